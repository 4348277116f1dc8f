// Products of bfloat16 pairs on AMX tiles: the same layouts as tiles.h; what is added to C is
// summed up on top of it. A tile is 16 rows of 16 units or floats, so rows of A and C are taken in
// sixteens and the summed units too: the buffers must reach so far, A's and B's extra units must be
// zero, and C's extra rows are overwritten.
#pragma once

#include "tiles.h"

namespace mdcp {

// Amx: the instructions (amx.h), on eight tiles of the thread.
template <class S, class M, class Amx>
struct AmxTiles : Tiles<S, M> {
  using Tiles<S, M>::W;
  using Tiles<S, M>::kPanel;
  static constexpr int64_t kStrip = 32;
  static constexpr int64_t kTaskRows = 512;
  static constexpr int64_t kTaskKeys = 512;
  static constexpr int64_t kRowStep = 16;
  static constexpr int64_t kColumnStep = 2;

  // Eight full tiles on this thread; what another library had set comes back at the end (it may
  // take its configuration for granted).
  class Session {
   public:
    Session() {
      typename Amx::Config own;
      own.palette = 1;
      for (int t = 0; t < 8; ++t) {
        own.row_bytes[t] = 64;
        own.rows[t] = 16;
      }
      Amx::read_configuration(before_);
      Amx::configure(own);
    }
    ~Session() { Amx::configure(before_); }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;

   private:
    typename Amx::Config before_;
  };

  // R x N tiles of C: sums in tiles 0..3, A in 4 and 5, B in 6 and 7.
  template <int R, int N, bool kAdd>
  static void block(int64_t steps, const float* a, int64_t lda, const float* b, float* c,
                    int64_t ldc) {
    if constexpr (kAdd) {
      Amx::template load<0>(c, ldc);
      if constexpr (N > 1) Amx::template load<1>(c + 16, ldc);
      if constexpr (R > 1) Amx::template load<2>(c + 16 * ldc, ldc);
      if constexpr (R > 1 && N > 1) Amx::template load<3>(c + 16 * ldc + 16, ldc);
    } else {
      Amx::template zero<0>();
      if constexpr (N > 1) Amx::template zero<1>();
      if constexpr (R > 1) Amx::template zero<2>();
      if constexpr (R > 1 && N > 1) Amx::template zero<3>();
    }
    for (int64_t k = 0; k < steps; ++k, a += 16, b += 16 * kPanel) {
      Amx::template load<6>(b, kPanel);
      Amx::template load<4>(a, lda);
      Amx::template mac<0, 4, 6>();
      if constexpr (R > 1) Amx::template load<5>(a + 16 * lda, lda);
      if constexpr (R > 1) Amx::template mac<2, 5, 6>();
      if constexpr (N > 1) Amx::template load<7>(b + 16, kPanel);
      if constexpr (N > 1) Amx::template mac<1, 4, 7>();
      if constexpr (R > 1 && N > 1) Amx::template mac<3, 5, 7>();
    }
    Amx::template store<0>(c, ldc);
    if constexpr (N > 1) Amx::template store<1>(c + 16, ldc);
    if constexpr (R > 1) Amx::template store<2>(c + 16 * ldc, ldc);
    if constexpr (R > 1 && N > 1) Amx::template store<3>(c + 16 * ldc + 16, ldc);
  }

  template <int N, bool kAdd>
  static void blocks(int64_t m, int64_t steps, const float* a, int64_t lda, const float* b,
                     float* c, int64_t ldc) {
    for (; m > 16; m -= 32, a += 32 * lda, c += 32 * ldc) {
      block<2, N, kAdd>(steps, a, lda, b, c, ldc);
    }
    if (m > 0) block<1, N, kAdd>(steps, a, lda, b, c, ldc);
  }

  // As Tiles::product, but rows and depth are rounded up to 16.
  template <bool kAdd, int64_t kStride = kPanel>
  static void product(int64_t m, int64_t first, int64_t last, int64_t depth, const float* a,
                      int64_t lda, const float* b, int64_t panel, float* c, int64_t ldc) {
    static_assert(kStride == kPanel);
    const int64_t steps = (depth + 15) / 16;
    for (int64_t v = first; v < last;) {
      const float* bp = b + (v / 4) * panel + v % 4 * W;
      if (v % 2 == 0 && v + 1 < last) {
        blocks<2, kAdd>(m, steps, a, lda, bp, c + v * W, ldc);
        v += 2;
      } else {
        blocks<1, kAdd>(m, steps, a, lda, bp, c + v * W, ldc);
        v += 1;
      }
    }
  }
};

}  // namespace mdcp
