// float32 (and 16-bit storage widened to it) on AVX2 + FMA.
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
#pragma GCC target("avx2,fma,f16c")
#include "avx2_tiles.h"
#include "vector_path.h"

namespace mdcp {
namespace {

using T = Avx2Tiles;

constexpr Path kPath = vector_path<T>("avx2");

}  // namespace
#pragma GCC pop_options

const Path* const kAvx2 = &kPath;

}  // namespace mdcp

#else
#include "paths.h"
namespace mdcp {
const Path* const kAvx2 = nullptr;
}
#endif
