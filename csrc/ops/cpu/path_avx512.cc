// float32 (and 16-bit storage widened to it) on AVX-512.
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
#include <type_traits>
#include <vector>

#include "attention.h"
#include "convert.h"
#include "paths.h"
#include "plan.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#include "simd_avx512.h"
#include "vector_backward.h"
#include "vector_forward.h"

namespace mdcp {
namespace {

using T = Tiles<Avx512, MacFloat<Avx512>>;

const Path kPath{"avx512",
                 &Forward<T>::least_rows,
                 &Forward<T>::most_rows,
                 &Backward<T>::least_keys,
                 &Backward<T>::most_keys,
                 Backward<T>::kQ,
                 &vector_forward<T>,
                 &vector_backward<T>};

}  // namespace
#pragma GCC pop_options

const Path* const kAvx512 = &kPath;

}  // namespace mdcp

#else
#include "paths.h"
namespace mdcp {
const Path* const kAvx512 = nullptr;
}
#endif
