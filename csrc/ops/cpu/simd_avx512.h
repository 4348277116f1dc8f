// AVX-512 vectors. Include after `#pragma GCC target`; every member is inlined into its caller.
#pragma once

#include <immintrin.h>

#include "convert.h"
#include "exp2_series.h"

namespace mdcp {

struct Avx512 {
  using V = __m512;
  using I = __m512i;
  static constexpr int W = 16;  // lanes
  static constexpr int MR = 6;  // rows of a register tile
  static constexpr int NV = 4;  // vectors of a register tile: 24 accumulators of 32 registers

  static V zero() { return _mm512_setzero_ps(); }
  static V set(float x) { return _mm512_set1_ps(x); }
  static V load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, V v) { _mm512_storeu_ps(p, v); }
  static void stream(float* p, V v) { _mm512_stream_ps(p, v); }  // p aligned to 64 bytes
  static void fence() { _mm_sfence(); }  // after stream: before another thread reads
  static V add(V a, V b) { return _mm512_add_ps(a, b); }
  static V sub(V a, V b) { return _mm512_sub_ps(a, b); }
  static V mul(V a, V b) { return _mm512_mul_ps(a, b); }
  static V div(V a, V b) { return _mm512_div_ps(a, b); }
  static V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
  static V fms(V a, V b, V c) { return _mm512_fmsub_ps(a, b, c); }
  static V min(V a, V b) { return _mm512_min_ps(a, b); }
  static V max(V a, V b) { return _mm512_max_ps(a, b); }  // b where a lane is NaN

  // v in lanes [lo, hi), `other` elsewhere; lo and hi may lie outside 0..16.
  static V within(V v, int64_t lo, int64_t hi, V other) {
    const uint32_t below = hi <= 0 ? 0u : (hi >= 16 ? 0xffffu : (1u << hi) - 1u);
    const uint32_t from = lo <= 0 ? 0u : (lo >= 16 ? 0xffffu : (1u << lo) - 1u);
    return _mm512_mask_mov_ps(other, static_cast<__mmask16>(below & ~from), v);
  }

  // 2^x; exactly 0 below -150, NaN stays NaN. Degree 6: relative error 2.6e-9 before rounding.
  static V exp2(V x) {
    const V f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return _mm512_scalef_ps(fma(power_series<Avx512>(f), f, set(1.0f)), _mm512_sub_ps(x, f));
  }
  // The same with degree 4, relative error 3e-6: for results that are rounded to 16 bits.
  static V exp2_coarse(V x) {
    const V f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    V p = set(1.342668441409713e-2f);
    p = fma(p, f, set(5.2242473901690733e-2f));
    p = fma(p, f, set(2.4128020498016768e-1f));
    p = fma(p, f, set(6.930448448535243e-1f));
    return _mm512_scalef_ps(fma(p, f, set(1.0f)), x);  // takes the floor of x
  }
  static V round(V x) {
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static V power(V n) { return _mm512_scalef_ps(set(1.0f), n); }  // 2^n, n whole, |n| < 126

  static I load_ints(const uint32_t* p) { return _mm512_loadu_si512(p); }
  static I set_int(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
  static I add_ints(I a, I b) { return _mm512_add_epi32(a, b); }
  static I exclusive_or(I a, I b) { return _mm512_xor_si512(a, b); }
  static void multiply(I a, uint32_t m, I& high, I& low) {  // both halves of the products
    const I even = _mm512_mul_epu32(a, set_int(m));
    const I odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), set_int(m));
    high = _mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
    low = _mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
  }
  static V where_at_least(I words, uint32_t least, V v) {  // 0 elsewhere
    return _mm512_maskz_mov_ps(_mm512_cmpge_epu32_mask(words, set_int(least)), v);
  }
  static float sum(V v) { return _mm512_reduce_add_ps(v); }
  static float highest(V v) { return _mm512_reduce_max_ps(v); }

  // dst[c][r] = src[r][c] for 16 x 16 words; leading dimensions in words.
  static void transpose(const float* src, int64_t ld_src, float* dst, int64_t ld_dst) {
    V r[16], t[16];
    for (int i = 0; i < 16; ++i) r[i] = load(src + i * ld_src);
    for (int i = 0; i < 8; ++i) {
      t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
      t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; ++i) {
      for (int j = 0; j < 2; ++j) {
        const __m512d a = _mm512_castps_pd(t[4 * i + j]), b = _mm512_castps_pd(t[4 * i + 2 + j]);
        r[4 * i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
        r[4 * i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
      }
    }
    for (int i = 0; i < 4; ++i) {
      t[i] = _mm512_shuffle_f32x4(r[i], r[4 + i], 0x88);
      t[4 + i] = _mm512_shuffle_f32x4(r[i], r[4 + i], 0xdd);
      t[8 + i] = _mm512_shuffle_f32x4(r[8 + i], r[12 + i], 0x88);
      t[12 + i] = _mm512_shuffle_f32x4(r[8 + i], r[12 + i], 0xdd);
    }
    for (int i = 0; i < 8; ++i) {
      store(dst + i * ld_dst, _mm512_shuffle_f32x4(t[i], t[8 + i], 0x88));
      store(dst + (8 + i) * ld_dst, _mm512_shuffle_f32x4(t[i], t[8 + i], 0xdd));
    }
  }

  // 16 elements of a 16-bit type.
  static V load_bf16(const uint16_t* p) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
  }
  static V load_half(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static __m256i to_bf16(V v) {
    const __m512i u = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i r = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    r = _mm512_mask_or_epi32(r, nan, u, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16));
  }
  static void store_bf16(uint16_t* p, V v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16(v));
  }
  static void stream_bf16(uint16_t* p, V v) {  // p aligned to 32 bytes
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), to_bf16(v));
  }
  static void store_half(uint16_t* p, V v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
};

}  // namespace mdcp
