// The register tiles of AVX2. Include after `#pragma GCC target`.
#pragma once

#include "simd_avx2.h"
#include "tiles.h"

namespace mdcp {

struct Avx2Tiles : Tiles<Avx2, MacFloat<Avx2>> {
  // Four panels: over the 16 rows of one, dV and dK are loaded and stored for a quarter of the
  // work.
  static constexpr int64_t kSweep = 64;
};

}  // namespace mdcp
