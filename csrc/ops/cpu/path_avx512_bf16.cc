// bfloat16 products with float32 sums (vdpbf16ps).
#if defined(__x86_64__) && defined(__GNUC__)

// The standard headers come first: nothing of them may be compiled for the wider machine.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "attention.h"
#include "convert.h"
#include "paths.h"
#include "plan.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,avx512bf16")
#include "simd_avx512.h"
#include "vector_backward.h"
#include "vector_forward.h"

namespace mdcp {
namespace {

using Simd = Avx512;

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
  static V zip_floats(V low, V high) {
    const __m512i x = _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(low)));
    const __m512i y = _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(high)));
    return _mm512_castsi512_ps(_mm512_or_si512(x, _mm512_slli_epi32(y, 16)));
  }
  // n floats (a multiple of 16) to n / 2 units.
  static void narrow(float* dst, const float* src, int64_t n) {
    for (int64_t i = 0; i < n; i += 16) {
      const __m256i h = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_loadu_ps(src + i)));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + i / 2), h);
    }
  }
};
using Mac = MacBf16;

const Path kPath{
    "avx512_bf16",           &Forward<Simd, Mac>::piece_rows, &Backward<Simd, Mac>::piece_keys,
    Backward<Simd, Mac>::kQ, &vector_forward<Simd, Mac>,      &vector_backward<Simd, Mac>};

}  // namespace
#pragma GCC pop_options

const Path* const kAvx512Bf16 = &kPath;

}  // namespace mdcp

#else
#include "paths.h"
namespace mdcp {
const Path* const kAvx512Bf16 = nullptr;
}
#endif
