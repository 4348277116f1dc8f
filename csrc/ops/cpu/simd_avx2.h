// AVX2 + FMA + F16C vectors. Include after `#pragma GCC target`.
#pragma once

#include <immintrin.h>

#include "convert.h"
#include "exp2_series.h"

namespace mdcp {

struct Avx2 {
  using V = __m256;
  using I = __m256i;
  static constexpr int W = 8;
  static constexpr int MR = 6;
  static constexpr int NV = 2;  // 12 accumulators of 16 registers

  static V zero() { return _mm256_setzero_ps(); }
  static V set(float x) { return _mm256_set1_ps(x); }
  static V load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, V v) { _mm256_storeu_ps(p, v); }
  static void stream(float* p, V v) { _mm256_stream_ps(p, v); }  // p aligned to 32 bytes
  static void fence() { _mm_sfence(); }  // after stream: before another thread reads
  static V add(V a, V b) { return _mm256_add_ps(a, b); }
  static V sub(V a, V b) { return _mm256_sub_ps(a, b); }
  static V mul(V a, V b) { return _mm256_mul_ps(a, b); }
  static V div(V a, V b) { return _mm256_div_ps(a, b); }
  static V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
  static V fms(V a, V b, V c) { return _mm256_fmsub_ps(a, b, c); }
  static V min(V a, V b) { return _mm256_min_ps(a, b); }
  static V max(V a, V b) { return _mm256_max_ps(a, b); }  // b where a lane is NaN

  // v in lanes [lo, hi), `other` elsewhere; lo and hi may lie outside 0..8.
  static V within(V v, int64_t lo, int64_t hi, V other) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i from = _mm256_set1_epi32(static_cast<int>(lo < 0 ? 0 : (lo > 8 ? 8 : lo)));
    const __m256i to = _mm256_set1_epi32(static_cast<int>(hi < 0 ? 0 : (hi > 8 ? 8 : hi)));
    const __m256i in =
        _mm256_andnot_si256(_mm256_cmpgt_epi32(from, lane), _mm256_cmpgt_epi32(to, lane));
    return _mm256_blendv_ps(other, v, _mm256_castsi256_ps(in));
  }

  // 2^x; exactly 0 below -126.5 (no subnormals), NaN stays NaN, infinite from 128.
  static V exp2(V x) {
    x = _mm256_max_ps(set(-127.0f), x);
    const V bounded = _mm256_min_ps(set(128.0f), x);  // the second operand where NaN
    const V n = round(bounded);
    const V f = sub(bounded, n);
    return mul(fma(power_series<Avx2>(f), f, set(1.0f)), power(n));
  }
  static V round(V x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static V power(V n) {  // 2^n, n whole, -127 (which gives 0) to 128 (infinity)
    const __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(e, 23));
  }

  static I load_ints(const uint32_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static I set_int(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
  static I add_ints(I a, I b) { return _mm256_add_epi32(a, b); }
  static I exclusive_or(I a, I b) { return _mm256_xor_si256(a, b); }
  static void multiply(I a, uint32_t m, I& high, I& low) {  // both halves of the products
    const I even = _mm256_mul_epu32(a, set_int(m));
    const I odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), set_int(m));
    high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
    low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
  }
  static V where_at_least(I words, uint32_t least, V v) {  // 0 elsewhere
    const I in = _mm256_cmpeq_epi32(_mm256_max_epu32(words, set_int(least)), words);
    return _mm256_and_ps(_mm256_castsi256_ps(in), v);
  }
  static float sum(V v) {
    const __m128 a = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 b = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
  }
  static float highest(V v) {
    const __m128 a = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 b = _mm_max_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
  }

  // dst[c][r] = src[r][c] for 8 x 8 words.
  static void transpose(const float* src, int64_t ld_src, float* dst, int64_t ld_dst) {
    V r[8], t[8];
    for (int i = 0; i < 8; ++i) r[i] = load(src + i * ld_src);
    for (int i = 0; i < 4; ++i) {
      t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
      t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 2; ++i) {
      for (int j = 0; j < 2; ++j) {
        const V a = t[4 * i + j], b = t[4 * i + 2 + j];
        r[4 * i + 2 * j] = _mm256_shuffle_ps(a, b, 0x44);
        r[4 * i + 2 * j + 1] = _mm256_shuffle_ps(a, b, 0xee);
      }
    }
    for (int i = 0; i < 4; ++i) {
      store(dst + i * ld_dst, _mm256_permute2f128_ps(r[i], r[4 + i], 0x20));
      store(dst + (4 + i) * ld_dst, _mm256_permute2f128_ps(r[i], r[4 + i], 0x31));
    }
  }

  static V load_bf16(const uint16_t* p) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
  }
  static V load_half(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static __m128i to_bf16(V v) {
    const __m256i u = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    const __m256i near = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
    const V nan = _mm256_cmp_ps(v, v, _CMP_UNORD_Q);
    const __m256i r =
        _mm256_srli_epi32(_mm256_blendv_epi8(near, quiet, _mm256_castps_si256(nan)), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
  }
  static void store_bf16(uint16_t* p, V v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_bf16(v));
  }
  static void stream_bf16(uint16_t* p, V v) {  // p aligned to 16 bytes
    _mm_stream_si128(reinterpret_cast<__m128i*>(p), to_bf16(v));
  }
  static void store_half(uint16_t* p, V v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
};

}  // namespace mdcp
