// The tile instructions of AMX.
#pragma once

#include <cstdint>

namespace mdcp {

// The instructions by hand: gcc's intrinsics let plain stores pass tile loads.
struct Amx {
  struct alignas(64) Config {
    uint8_t palette = 0, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  };

  static void configure(const Config& c) { asm volatile("ldtilecfg %0" ::"m"(c) : "memory"); }
  static void read_configuration(Config& c) { asm volatile("sttilecfg %0" : "=m"(c)::"memory"); }
  template <int kTile>
  static void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
  }
  template <int kTile>  // `stride` in floats, from row to row
  static void load(const float* p, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride * 4), "i"(kTile) : "memory");
  }
  template <int kTile>
  static void store(float* p, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride * 4), "i"(kTile) : "memory");
  }
  template <int kC, int kA, int kB>
  static void mac() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
  }
};

}  // namespace mdcp
