// bfloat16 products with float32 sums on AMX tiles (tdpbf16ps).
#include "paths.h"

#if defined(__x86_64__) && defined(MDCP_HAS_AMX)

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
#include "plan.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,avx512bf16")
#include "amx.h"
#include "amx_tiles.h"
#include "mac_bf16.h"
#include "vector_path.h"

namespace mdcp {
namespace {

using T = AmxTiles<Avx512, MacBf16, Amx>;

constexpr Path kPath = vector_path<T>("amx_bf16");

}  // namespace
#pragma GCC pop_options

const Path* const kAmxBf16 = &kPath;

}  // namespace mdcp

#else
namespace mdcp {
const Path* const kAmxBf16 = nullptr;
}
#endif
