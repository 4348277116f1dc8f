// The vectors of AVX-512, its bfloat16 products and the tiles of AMX in plain C++, so that their
// paths run on machines without them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "ops/cpu/convert.h"

namespace mdcp {

struct Wide {
  typedef float V __attribute__((vector_size(64)));
  typedef uint32_t I __attribute__((vector_size(64)));
  static constexpr int W = 16, MR = 6, NV = 4;

  template <class F>
  static V each(const F& f) {
    V v;
    for (int l = 0; l < W; ++l) v[l] = f(l);
    return v;
  }
  static V zero() { return V{}; }
  static V set(float x) {
    return each([&](int) { return x; });
  }
  static V load(const float* p) {
    return each([&](int l) { return p[l]; });
  }
  static void store(float* p, V v) {
    for (int l = 0; l < W; ++l) p[l] = v[l];
  }
  static void stream(float* p, V v) { store(p, v); }
  static void fence() {}
  static V add(V a, V b) { return a + b; }
  static V sub(V a, V b) { return a - b; }
  static V mul(V a, V b) { return a * b; }
  static V div(V a, V b) { return a / b; }
  static V fma(V a, V b, V c) { return a * b + c; }
  static V fms(V a, V b, V c) { return a * b - c; }
  static V min(V a, V b) {
    return each([&](int l) { return a[l] < b[l] ? a[l] : b[l]; });
  }
  static V max(V a, V b) {
    return each([&](int l) { return a[l] > b[l] ? a[l] : b[l]; });
  }
  static V within(V v, int64_t lo, int64_t hi, V other) {
    return each([&](int l) { return l >= lo && l < hi ? v[l] : other[l]; });
  }
  static V exp2(V x) {
    return each([&](int l) { return std::exp2(x[l]); });
  }
  static V exp2_coarse(V x) { return exp2(x); }
  static V round(V x) {
    return each([&](int l) { return std::nearbyint(x[l]); });
  }
  static V power(V n) { return exp2(n); }

  static I load_ints(const uint32_t* p) {
    I v;
    for (int l = 0; l < W; ++l) v[l] = p[l];
    return v;
  }
  static I set_int(uint32_t x) { return I{} + x; }
  static I add_ints(I a, I b) { return a + b; }
  static I exclusive_or(I a, I b) { return a ^ b; }
  static void multiply(I a, uint32_t m, I& high, I& low) {
    for (int l = 0; l < W; ++l) {
      const uint64_t product = uint64_t{a[l]} * m;
      high[l] = static_cast<uint32_t>(product >> 32);
      low[l] = static_cast<uint32_t>(product);
    }
  }
  static V where_at_least(I words, uint32_t least, V v) {
    return each([&](int l) { return words[l] >= least ? v[l] : 0.0f; });
  }
  static float sum(V v) {
    float total = 0;
    for (int l = 0; l < W; ++l) total += v[l];
    return total;
  }
  static float highest(V v) {
    float top = v[0];
    for (int l = 1; l < W; ++l) top = v[l] > top ? v[l] : top;
    return top;
  }
  static void transpose(const float* src, int64_t ld_src, float* dst, int64_t ld_dst) {
    V r[W];
    for (int i = 0; i < W; ++i) r[i] = load(src + i * ld_src);
    for (int i = 0; i < W; ++i) {
      for (int l = 0; l < W; ++l) dst[i * ld_dst + l] = r[l][i];
    }
  }
  static V load_bf16(const uint16_t* p) {
    return each([&](int l) { return bf16_to_float(p[l]); });
  }
  static V load_half(const uint16_t* p) {
    return each([&](int l) { return half_to_float(p[l]); });
  }
  static void store_bf16(uint16_t* p, V v) {
    for (int l = 0; l < W; ++l) p[l] = float_to_bf16(v[l]);
  }
  static void stream_bf16(uint16_t* p, V v) { store_bf16(p, v); }
  static void store_half(uint16_t* p, V v) {
    for (int l = 0; l < W; ++l) p[l] = float_to_half(v[l]);
  }
};

inline float pair_unit(uint16_t low, uint16_t high) {
  const uint32_t bits = uint32_t{high} << 16 | low;
  float unit;
  std::memcpy(&unit, &bits, 4);
  return unit;
}

// c + the products of two units' low and high values.
inline float pair_mac(float a, float b, float c) {
  uint32_t x, y;
  std::memcpy(&x, &a, 4);
  std::memcpy(&y, &b, 4);
  c += bf16_to_float(static_cast<uint16_t>(x)) * bf16_to_float(static_cast<uint16_t>(y));
  return c + bf16_to_float(static_cast<uint16_t>(x >> 16)) *
                 bf16_to_float(static_cast<uint16_t>(y >> 16));
}

struct MacPairs {
  using V = Wide::V;
  static constexpr int kPer = 2;
  static constexpr bool kPairs = true;

  static V broadcast(const float* a) { return Wide::set(*a); }
  static V mac(V a, V b, V c) {
    return Wide::each([&](int l) { return pair_mac(a[l], b[l], c[l]); });
  }
  static V zip(const uint16_t* a, const uint16_t* b) {
    return Wide::each([&](int l) { return pair_unit(a[l], b[l]); });
  }
  static void zip_two(float* dst, const uint16_t* a, const uint16_t* b) {
    for (int l = 0; l < 32; ++l) dst[l] = pair_unit(a[l], b[l]);
  }
  static void copy(uint16_t* dst, const uint16_t* src) { std::memcpy(dst, src, 64); }
  static V zip_floats(V low, V high) {
    return Wide::each(
        [&](int l) { return pair_unit(float_to_bf16(low[l]), float_to_bf16(high[l])); });
  }
  static void narrow(float* dst, V v) {
    for (int l = 0; l < 8; ++l) {
      dst[l] = pair_unit(float_to_bf16(v[2 * l]), float_to_bf16(v[2 * l + 1]));
    }
  }
};

struct WideTilesConfig {
  uint8_t palette = 0;
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

struct WideTiles {
  using Config = WideTilesConfig;
  static inline thread_local Config config;
  static inline thread_local float tiles[8][16][16];

  static void configure(const Config& c) { config = c; }
  static void read_configuration(Config& c) { c = config; }
  template <int kTile>
  static void zero() {
    std::memset(tiles[kTile], 0, sizeof tiles[kTile]);
  }
  template <int kTile>
  static void load(const float* p, int64_t stride) {
    for (int r = 0; r < 16; ++r) std::memcpy(tiles[kTile][r], p + r * stride, 64);
  }
  template <int kTile>
  static void store(float* p, int64_t stride) {
    for (int r = 0; r < 16; ++r) std::memcpy(p + r * stride, tiles[kTile][r], 64);
  }
  template <int kC, int kA, int kB>
  static void mac() {
    for (int m = 0; m < 16; ++m) {
      for (int k = 0; k < 16; ++k) {
        for (int n = 0; n < 16; ++n) {
          tiles[kC][m][n] = pair_mac(tiles[kA][m][k], tiles[kB][k][n], tiles[kC][m][n]);
        }
      }
    }
  }
};

}  // namespace mdcp
