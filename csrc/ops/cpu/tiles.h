// Register-tile matrix products and the packing that feeds them, templated on
//   S: vectors (simd_*.h), float lanes;
//   M: multiply-accumulate on 32-bit units. A unit is one float, or a pair of bfloat16 values that
//      are neighbours along the summed dimension.
//
// C[m][n] (+)= sum_k A[m][k] * B[k][n]. A is row-major units. B is in panels of kPanel columns:
// unit (k, n) lies at panel(n / kPanel) + k * kPanel + n % kPanel (or k * kStride where a product
// says so). C is row-major float. The sum of each element runs over k in order whatever the tile
// shape, so rows do not influence each other. What is added to C is summed up first: over many
// products the rounding errors then grow with their number, not with that of the terms.
#pragma once

#include <cstdint>
#include <cstring>

#include "convert.h"

namespace mdcp {

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// One float a unit.
template <class S>
struct MacFloat {
  using V = typename S::V;
  static constexpr int kPer = 1;
  static constexpr bool kPairs = false;
  static V broadcast(const float* a) { return S::set(*a); }
  static V mac(V a, V b, V c) { return S::fma(a, b, c); }
};

template <class S_, class M_>
struct Tiles {
  using S = S_;
  using M = M_;
  using V = typename S::V;
  static constexpr int W = S::W;
  static constexpr int64_t kStrip = 12;      // rows whose scores are alive at once
  static constexpr int64_t kChunk = 256;     // keys packed at once in the forward
  static constexpr int64_t kTaskRows = 256;  // q rows of a forward task, over its heads, at least
  static constexpr int64_t kTaskKeys = 256;  // keys of a backward task, at least
  static constexpr int64_t kRowStep = 1;     // products may write rows up to a multiple of this
  static constexpr int64_t kColumnStep = 1;  // vectors that a summed dimension is a multiple of
  struct Session {                           // what a thread holds while it multiplies
    Session() {}                             // (not trivial: no warning where it is unused)
  };
  static constexpr int64_t kPanel = int64_t{S::W} * S::NV;
  static constexpr int64_t kSweep = kPanel;  // q rows that a backward task takes at once
  static constexpr int kPer = M::kPer;

  static int64_t units(int64_t n) { return (n + kPer - 1) / kPer; }

  template <int R, int N, bool kAdd, int64_t kStride>
  static void tile(int64_t depth, const float* a, int64_t lda, const float* b, float* c,
                   int64_t ldc) {
    V acc[R][N];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) acc[r][n] = S::zero();
    }
    for (int64_t k = 0; k < depth; ++k) {
      V x[N];
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) x[n] = S::load(b + k * kStride + n * W);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const V y = M::broadcast(a + r * lda + k);
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) acc[r][n] = M::mac(y, x[n], acc[r][n]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) {
        float* at = c + r * ldc + n * W;
        S::store(at, kAdd ? S::add(S::load(at), acc[r][n]) : acc[r][n]);
      }
    }
  }

  template <int N, bool kAdd, int64_t kStride>
  static void rows(int64_t m, int64_t depth, const float* a, int64_t lda, const float* b, float* c,
                   int64_t ldc) {
    while (m >= S::MR) {
      tile<S::MR, N, kAdd, kStride>(depth, a, lda, b, c, ldc);
      a += S::MR * lda;
      c += S::MR * ldc;
      m -= S::MR;
    }
    switch (m) {
      case 5:
        tile<5, N, kAdd, kStride>(depth, a, lda, b, c, ldc);
        break;
      case 4:
        tile<4, N, kAdd, kStride>(depth, a, lda, b, c, ldc);
        break;
      case 3:
        tile<3, N, kAdd, kStride>(depth, a, lda, b, c, ldc);
        break;
      case 2:
        tile<2, N, kAdd, kStride>(depth, a, lda, b, c, ldc);
        break;
      case 1:
        tile<1, N, kAdd, kStride>(depth, a, lda, b, c, ldc);
        break;
      default:
        break;
    }
  }

  // Columns [first, last) in vectors of W; `panel` units from one panel of B to the next. C's
  // column 0 is column 0 of B.
  template <bool kAdd, int64_t kStride = kPanel>
  static void product(int64_t m, int64_t first, int64_t last, int64_t depth, const float* a,
                      int64_t lda, const float* b, int64_t panel, float* c, int64_t ldc) {
    for (int64_t v = first; v < last;) {
      const int64_t inside = v % S::NV;
      int64_t n = S::NV - inside;
      if (n > last - v) n = last - v;
      const float* bp = b + (v / S::NV) * panel + inside * W;
      float* cp = c + v * W;
      if (n == 1) rows<1, kAdd, kStride>(m, depth, a, lda, bp, cp, ldc);
      if (n == 2) rows<2, kAdd, kStride>(m, depth, a, lda, bp, cp, ldc);
      if constexpr (S::NV > 2) {
        if (n == 3) rows<3, kAdd, kStride>(m, depth, a, lda, bp, cp, ldc);
        if (n == 4) rows<4, kAdd, kStride>(m, depth, a, lda, bp, cp, ldc);
      }
      v += n;
    }
  }

  // ---- rows in and out -------------------------------------------------------------------------

  static void load_floats(float* dst, const Rows& x, int64_t row, int64_t head, int64_t n) {
    const void* p = x.at(row, head);
    int64_t i = 0;
    if (x.dtype == DType::kFloat32) {
      const float* f = static_cast<const float*>(p);
      for (; i + W <= n; i += W) S::store(dst + i, S::load(f + i));
      for (; i < n; ++i) dst[i] = f[i];
    } else if (x.dtype == DType::kBFloat16) {
      const uint16_t* h = static_cast<const uint16_t*>(p);
      for (; i + W <= n; i += W) S::store(dst + i, S::load_bf16(h + i));
      for (; i < n; ++i) dst[i] = bf16_to_float(h[i]);
    } else {
      const uint16_t* h = static_cast<const uint16_t*>(p);
      for (; i + W <= n; i += W) S::store(dst + i, S::load_half(h + i));
      for (; i < n; ++i) dst[i] = half_to_float(h[i]);
    }
  }

  // W values from column d on of the row at p.
  static V load_vector(DType type, const void* p, int64_t d) {
    if (type == DType::kFloat32) return S::load(static_cast<const float*>(p) + d);
    const uint16_t* h = static_cast<const uint16_t*>(p) + d;
    return type == DType::kBFloat16 ? S::load_bf16(h) : S::load_half(h);
  }

  // Whether results of this size are written around the caches: a line that is written whole need
  // not be fetched first, and one so far from its reader would not stay in the cache anyway.
  static bool past_caches(const Rows& x, int64_t rows, int64_t heads, int64_t dim) {
    return rows * heads * dim * element_bytes(x.dtype) >= int64_t{4} << 20;
  }

  // Stores, or for float32 with `add` accumulates, n values times `factor`. After stores `past` the
  // caches the thread owes the others an S::fence().
  static void store_floats(const Rows& x, int64_t row, int64_t head, int64_t n, const float* src,
                           float factor, bool add, bool past = false) {
    void* p = x.at(row, head);
    const V f = S::set(factor);
    past &= reinterpret_cast<uintptr_t>(p) % 64 == 0;
    int64_t i = 0;
    if (x.dtype == DType::kFloat32) {
      float* d = static_cast<float*>(p);
      if (add) {
        for (; i + W <= n; i += W) S::store(d + i, S::add(S::load(d + i), S::load(src + i)));
        for (; i < n; ++i) d[i] += src[i];
      } else {
        if (past) {
          for (; i + W <= n; i += W) S::stream(d + i, S::mul(S::load(src + i), f));
        }
        for (; i + W <= n; i += W) S::store(d + i, S::mul(S::load(src + i), f));
        for (; i < n; ++i) d[i] = src[i] * factor;
      }
    } else if (x.dtype == DType::kBFloat16) {
      uint16_t* d = static_cast<uint16_t*>(p);
      if (past) {
        for (; i + W <= n; i += W) S::stream_bf16(d + i, S::mul(S::load(src + i), f));
      }
      for (; i + W <= n; i += W) S::store_bf16(d + i, S::mul(S::load(src + i), f));
      for (; i < n; ++i) d[i] = float_to_bf16(src[i] * factor);
    } else {
      uint16_t* d = static_cast<uint16_t*>(p);
      for (; i + W <= n; i += W) S::store_half(d + i, S::mul(S::load(src + i), f));
      for (; i < n; ++i) d[i] = float_to_half(src[i] * factor);
    }
  }

  // One row as units along dim; a lone last bfloat16 is paired with zero.
  static void load_units(float* dst, const Rows& x, int64_t row, int64_t head, int64_t n) {
    if constexpr (M::kPairs) {
      dst[units(n) - 1] = 0.0f;
      load_bf16s(reinterpret_cast<uint16_t*>(dst), x, row, head, n);
    } else {
      load_floats(dst, x, row, head, n);
    }
  }

  // A row as bfloat16, rounded where it is stored wider (a float32 dout of bfloat16 inputs).
  static void load_bf16s(uint16_t* dst, const Rows& x, int64_t row, int64_t head, int64_t n) {
    if (x.dtype == DType::kBFloat16) {
      const uint16_t* h = static_cast<const uint16_t*>(x.at(row, head));
      int64_t i = 0;
      for (; i + 2 * W <= n; i += 2 * W) M::copy(dst + i, h + i);
      for (; i < n; ++i) dst[i] = h[i];
      return;
    }
    const float* f = static_cast<const float*>(x.at(row, head));
    int64_t i = 0;
    for (; i + W <= n; i += W) S::store_bf16(dst + i, S::load(f + i));
    for (; i < n; ++i) dst[i] = float_to_bf16(f[i]);
  }

  static bool stored_as_units(const Rows& x) {
    if (!M::kPairs) return x.dtype == DType::kFloat32;
    return x.dtype == DType::kBFloat16 && x.row_stride % 2 == 0;
  }

  // ---- packing ---------------------------------------------------------------------------------

  // A: rows of units along dim, zero up to `ld`.
  static void pack_rows(float* dst, int64_t ld, const Rows& x, int64_t row, int64_t head,
                        int64_t count, int64_t dim) {
    for (int64_t r = 0; r < count; ++r, dst += ld) {
      load_units(dst, x, row + r, head, dim);
      for (int64_t i = units(dim); i < ld; ++i) dst[i] = 0.0f;
    }
  }

  // B with columns = tokens and depth = dim units; columns up to a multiple of W are zero.
  // `depth` is the panel's depth, a multiple of W. `spare` holds W * depth units.
  static void pack_transposed(float* dst, int64_t depth, const Rows& x, int64_t row, int64_t head,
                              int64_t count, int64_t dim, float* spare) {
    const int64_t du = units(dim);
    const bool direct = stored_as_units(x) && du == depth;
    for (int64_t t = 0; t < count; t += W) {
      const float* src = static_cast<const float*>(x.at(row + t, head));
      int64_t ld = x.row_stride / kPer;
      if (!direct || t + W > count) {
        for (int64_t r = 0; r < W; ++r) {
          float* line = spare + r * depth;
          int64_t filled = 0;
          if (t + r < count) {
            load_units(line, x, row + t + r, head, dim);
            filled = du;
          }
          for (int64_t i = filled; i < depth; ++i) line[i] = 0.0f;
        }
        src = spare;
        ld = depth;
      }
      float* out = dst + (t / kPanel) * depth * kPanel + t % kPanel;
      for (int64_t u = 0; u < depth; u += W) S::transpose(src + u, ld, out + u * kPanel, kPanel);
    }
  }

  // B with columns = dim and depth = token units; columns and tokens up to a multiple of W are
  // zero. `panel` units separate panels. `spare` holds 2 * round_up(dim, W) units.
  static void pack_natural(float* dst, int64_t panel, const Rows& x, int64_t row, int64_t head,
                           int64_t count, int64_t dim, float* spare) {
    const int64_t wide = round_up(dim, W), deep = round_up(units(count), W);
    for (int64_t k = 0; k < deep; ++k) {
      const int64_t t = k * kPer;
      if constexpr (M::kPairs) {
        auto* low = reinterpret_cast<uint16_t*>(spare);
        uint16_t* high = low + wide;
        const uint16_t* a = pair_row(low, x, row + t, head, t < count, dim, wide);
        const uint16_t* b = pair_row(high, x, row + t + 1, head, t + 1 < count, dim, wide);
        int64_t c = 0;  // two vectors at a time; a panel holds an even number of them
        for (; c + 2 * W <= wide; c += 2 * W) M::zip_two(at(dst, panel, k, c), a + c, b + c);
        if (c < wide) S::store(at(dst, panel, k, c), M::zip(a + c, b + c));
      } else {
        const float* a = spare;
        if (t < count && x.dtype == DType::kFloat32 && wide == dim) {
          a = static_cast<const float*>(x.at(row + t, head));
        } else {
          int64_t filled = 0;
          if (t < count) {
            load_floats(spare, x, row + t, head, dim);
            filled = dim;
          }
          for (int64_t i = filled; i < wide; ++i) spare[i] = 0.0f;
        }
        for (int64_t c = 0; c < wide; c += W) S::store(at(dst, panel, k, c), S::load(a + c));
      }
    }
  }

  // A = the transpose of a natural B: row d holds the token units, `ld` (a multiple of W) apart.
  static void transpose_natural(float* dst, int64_t ld, const float* src, int64_t panel,
                                int64_t count, int64_t dim) {
    const int64_t wide = round_up(dim, W), deep = round_up(units(count), W);
    for (int64_t c = 0; c < wide; c += W) {
      for (int64_t k = 0; k < deep; k += W) {
        S::transpose(src + (c / kPanel) * panel + k * kPanel + c % kPanel, kPanel, dst + c * ld + k,
                     ld);
      }
    }
  }

 private:
  static float* at(float* dst, int64_t panel, int64_t k, int64_t c) {
    return dst + (c / kPanel) * panel + k * kPanel + c % kPanel;
  }

  static const uint16_t* pair_row(uint16_t* spare, const Rows& x, int64_t row, int64_t head,
                                  bool present, int64_t dim, int64_t wide) {
    if (present && dim == wide && x.dtype == DType::kBFloat16) {
      return static_cast<const uint16_t*>(x.at(row, head));
    }
    if (present) load_bf16s(spare, x, row, head, dim);
    const int64_t filled = present ? dim : 0;
    std::memset(spare + filled, 0, 2 * (wide - filled));
    return spare;
  }
};

}  // namespace mdcp
