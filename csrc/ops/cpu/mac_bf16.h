// Pairs of bfloat16 as units of the tile products (tiles.h). Include after `#pragma GCC target`
// with avx512bf16.
#pragma once

#include "simd_avx512.h"

namespace mdcp {

// A unit is two bfloat16 values that are neighbours along the summed dimension.
struct MacBf16 {
  using V = __m512;
  static constexpr int kPer = 2;
  static constexpr bool kPairs = true;

  static V broadcast(const float* a) { return _mm512_set1_ps(*a); }
  static V mac(V a, V b, V c) {
    return _mm512_dpbf16_ps(c, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
  // 16 units (a[i], b[i]).
  static V zip(const uint16_t* a, const uint16_t* b) {
    const __m512i x = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)a));
    const __m512i y = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)b));
    return _mm512_castsi512_ps(_mm512_or_si512(x, _mm512_slli_epi32(y, 16)));
  }
  // 32 units (a[i], b[i]).
  static void zip_two(float* dst, const uint16_t* a, const uint16_t* b) {
    const __m512i x = _mm512_loadu_si512(a), y = _mm512_loadu_si512(b);
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40,
                                         8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    _mm512_storeu_si512(dst, _mm512_permutex2var_epi16(x, low, y));
    _mm512_storeu_si512(dst + 16, _mm512_permutex2var_epi16(x, high, y));
  }
  static void copy(uint16_t* dst, const uint16_t* src) {  // 32 values
    _mm512_storeu_si512(dst, _mm512_loadu_si512(src));
  }
  static V zip_floats(V low, V high) {
    const __m512i both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
    const __m512i turn =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_castsi512_ps(_mm512_permutexvar_epi16(turn, both));
  }
  // 16 floats to 8 units.
  static void narrow(float* dst, V v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst),
                        reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v)));
  }
};

}  // namespace mdcp
