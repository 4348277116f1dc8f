// Kernels that are wrong in one way each, to see that the SIMT machine notices; and the right
// version of each beside it. Every kernel gets 256 floats and writes 256 floats.
#include "ops/cuda/simt.cuh"

namespace {

using namespace mdcp::cuda;

struct Io {
  const float* in;
  float* out;
};

constexpr int kThreads = 256;

// Reverses through shared memory. Without the barrier a warp reads what another has not written.
void reverse(Io io) {
  MDCP_SHARED_ARRAY(float, tile, kThreads);
  const int t = thread_index();
  tile[t] = io.in[t];
  block_sync();
  io.out[t] = tile[kThreads - 1 - t];
}

// Reads what the warp before wrote: in lockstep, in order, it is there even without the barrier.
void from_the_left(Io io) {
  MDCP_SHARED_ARRAY(float, tile, kThreads);
  const int t = thread_index();
  tile[t] = io.in[t];
  block_sync();
  io.out[t] = tile[t < 32 ? t : t - 32];
}

// Two rounds through one buffer: the second barrier keeps a fast warp from overwriting it.
void two_rounds(Io io) {
  MDCP_SHARED_ARRAY(float, tile, kThreads);
  const int t = thread_index();
  float sum = 0.f;
  for (int round = 0; round < 2; ++round) {
    tile[t] = io.in[t] + float(1000 * round);
    block_sync();
    sum += tile[kThreads - 1 - t];
    block_sync();
  }
  io.out[t] = sum;
}

// Neighbours of one warp exchange through shared memory: lanes are not in lockstep.
void warp_exchange(Io io) {
  MDCP_SHARED_ARRAY(float, tile, kThreads);
  const int t = thread_index();
  tile[t] = io.in[t];
  warp_sync();
  io.out[t] = tile[t ^ 1];
}

void async_copy(Io io) {
  MDCP_DYNAMIC_SHARED(memory);
  float* const tile = reinterpret_cast<float*>(memory);
  const int t = thread_index();
  if (t < kThreads / 4) copy_async_16(tile + 4 * t, io.in + 4 * t, true);
  copy_async_commit();
  copy_async_wait<0>();
  block_sync();
  io.out[t] = tile[t];
}

void unwritten_shared(Io io) {
  MDCP_SHARED_ARRAY(float, tile, kThreads);
  io.out[thread_index()] = tile[thread_index()];
}

void lonely_barrier(Io io) {
  if (thread_index() < 64) block_sync();
  io.out[thread_index()] = 0.f;
}

void crossed_barriers(Io io) {
  if (thread_index() < 64) {
    block_sync();
  } else {
    block_sync();
  }
  io.out[thread_index()] = 0.f;
}

void half_a_shuffle(Io io) {
  float x = io.in[thread_index()];
  if (thread_index() % 32 < 16) x = shuffle_xor(x, 1);
  io.out[thread_index()] = x;
}

void past_shared(Io io) {
  MDCP_DYNAMIC_SHARED(memory);
  float* const tile = reinterpret_cast<float*>(memory);
  tile[thread_index() + 1] = io.in[thread_index()];
  io.out[thread_index()] = 0.f;
}

void past_global(Io io) { io.out[thread_index() + 1] = io.in[thread_index()]; }

// A 16x16 by 16x8 product of small integers, one warp: out [16][8] in elements 0 to 127.
void product(Io io) {
  MDCP_DYNAMIC_SHARED(memory);
  bf16* const a = reinterpret_cast<bf16*>(memory);  // [16][16]
  bf16* const b = a + 256;                          // [16][16], columns 8 on are not used
  if (thread_index() < 256) {
    a[thread_index()] = from_float<bf16>(float(thread_index() % 7));
    b[thread_index()] = from_float<bf16>(float(thread_index() % 5) - 2.f);
  }
  block_sync();
  if (thread_index() < kWarp) {
    const int lane = thread_index();
    uint32_t fa[4], fb[4];
    load_matrix_x4(fa, a + lane % 16 * 16 + lane / 16 * 8);
    load_matrix_x4_transposed(fb, b + lane % 16 * 16 + lane / 16 * 8);
    float c[4] = {1.f, 1.f, 1.f, 1.f};
    mma_16x8x16(c, fa, fb[0], fb[1], bf16());
    for (int e = 0; e < 4; ++e)
      io.out[(lane / 4 + 8 * (e / 2)) * 8 + 2 * (lane % 4) + e % 2] = c[e];
  }
}

}  // namespace

#define FAULT(name)                                                        \
  extern "C" int fault_##name(const float* in, float* out) {               \
    return launch(&name, Io{in, out}, 1, kThreads, kThreads * 4, nullptr); \
  }
FAULT(reverse)
FAULT(from_the_left)
FAULT(two_rounds)
FAULT(warp_exchange)
FAULT(async_copy)
FAULT(unwritten_shared)
FAULT(lonely_barrier)
FAULT(crossed_barriers)
FAULT(half_a_shuffle)
FAULT(past_shared)
FAULT(past_global)
FAULT(product)
