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
#include <type_traits>
#include <vector>

#include "attention.h"
#include "convert.h"
#include "paths.h"
#include "plan.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,avx512bf16")
#include "mac_bf16.h"
#include "vector_path.h"

namespace mdcp {
namespace {

using T = Tiles<Avx512, MacBf16>;

constexpr Path kPath = vector_path<T>("avx512_bf16");

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
