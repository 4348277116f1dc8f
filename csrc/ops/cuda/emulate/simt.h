// What simt.cuh gives on a GPU, on the host: the same names, executed by the fibers of machine.cc.
// A synchronising primitive takes the line it is called from, so that a test can name it, leave it
// out and see whether the results notice.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>

#define MDCP_KERNEL
#define MDCP_DEVICE inline
#define MDCP_HOST_DEVICE inline
#define MDCP_BOUNDS(threads, blocks)
#define MDCP_UNROLL
#define MDCP_DYNAMIC_SHARED(name) \
  unsigned char* const name = ::mdcp::cuda::emulate::dynamic_shared()
#define MDCP_SHARED_ARRAY(type, name, count) \
  type* const name = static_cast<type*>(     \
      ::mdcp::cuda::emulate::static_shared(__FILE__, __LINE__, sizeof(type) * (count)))
#define MDCP_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

namespace mdcp::cuda {

// 16-bit storage types. Only bits: arithmetic is done in float, as in the kernels.
struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

constexpr int kWarp = 32;
constexpr int64_t kMostBlocks = 3;  // few, so that small shapes make blocks stride

namespace emulate {

enum class Operation { sync, shuffle, matrix, matrix_transposed, mma_bf16, mma_fp16 };

// What one lane brings to a warp operation and takes from it.
struct Operand {
  const void* address = nullptr;  // matrix: its row
  uint64_t value = 0;             // shuffle: in and out
  int source = 0;                 // shuffle: lane to read
  uint32_t* words = nullptr;      // matrix: 4 results; mma: a[4], b[2]
  float* accumulators = nullptr;  // mma: c[4]
};

int thread_index();
int block_size();
int block_index();
int block_count();
unsigned char* dynamic_shared();
void* static_shared(const char* file, int line, size_t bytes);
void block_barrier(const char* file, int line);
void warp_operation(Operation operation, Operand* operand, const char* file, int line);
int atomic_add(int* address, int value);
int atomic_max(int* address, int value);
[[noreturn]] void trap(const char* file, int line);
void copy_async(void* shared, const void* global, bool valid);
void copy_commit();
void copy_wait(int groups, const char* file, int line);

// Runs every block. Returns 0, or 719 (as a failed launch) with the reason in
// mdcp_emulate_last_error().
int run_grid(const std::function<void()>& kernel, int64_t blocks, int threads,
             int64_t shared_bytes);

const char* last_error_text();

}  // namespace emulate

inline int thread_index() { return emulate::thread_index(); }
inline int fresh_thread_index() { return emulate::thread_index(); }
inline int block_size() { return emulate::block_size(); }
inline int block_index() { return emulate::block_index(); }
inline int block_count() { return emulate::block_count(); }

inline void block_sync(MDCP_SITE) { emulate::block_barrier(file, line); }
inline void warp_sync(MDCP_SITE) {
  emulate::Operand operand;
  emulate::warp_operation(emulate::Operation::sync, &operand, file, line);
}

template <class T>
T shuffle_xor(T value, int mask, MDCP_SITE) {
  static_assert(sizeof(T) <= 8);
  emulate::Operand operand;
  std::memcpy(&operand.value, &value, sizeof(T));
  operand.source = (emulate::thread_index() % kWarp) ^ mask;
  emulate::warp_operation(emulate::Operation::shuffle, &operand, file, line);
  std::memcpy(&value, &operand.value, sizeof(T));
  return value;
}

inline int atomic_add(int* address, int value) { return emulate::atomic_add(address, value); }

inline int atomic_max(int* address, int value) { return emulate::atomic_max(address, value); }
inline void trap_unless(bool condition, MDCP_SITE) {
  if (!condition) emulate::trap(file, line);
}

inline void copy_async_16(void* shared, const void* global, bool valid) {
  emulate::copy_async(shared, global, valid);
}
inline void copy_async_commit() { emulate::copy_commit(); }
template <int N>
void copy_async_wait(MDCP_SITE) {
  emulate::copy_wait(N, file, line);
}

inline void load_matrix_x4(uint32_t (&r)[4], const void* row, MDCP_SITE) {
  emulate::Operand operand;
  operand.address = row;
  operand.words = r;
  emulate::warp_operation(emulate::Operation::matrix, &operand, file, line);
}
inline void load_matrix_x4_transposed(uint32_t (&r)[4], const void* row, MDCP_SITE) {
  emulate::Operand operand;
  operand.address = row;
  operand.words = r;
  emulate::warp_operation(emulate::Operation::matrix_transposed, &operand, file, line);
}

template <class T>
void mma_16x8x16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, T, MDCP_SITE) {
  uint32_t words[6] = {a[0], a[1], a[2], a[3], b0, b1};
  emulate::Operand operand;
  operand.words = words;
  operand.accumulators = c;
  constexpr bool is_bf16 = std::is_same_v<T, bf16>;
  emulate::warp_operation(is_bf16 ? emulate::Operation::mma_bf16 : emulate::Operation::mma_fp16,
                          &operand, file, line);
}

inline float exp2_approx(float x) { return std::exp2(x); }
inline float reciprocal_approx(float x) { return 1.f / x; }

inline float bits_to_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline uint32_t float_to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

inline float bf16_to_float(uint16_t bits) { return bits_to_float(uint32_t(bits) << 16); }
inline uint16_t float_to_bf16(float x) {  // to nearest, ties to even
  const uint32_t bits = float_to_bits(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
inline float fp16_to_float(uint16_t bits) {
  const uint32_t sign = uint32_t(bits & 0x8000u) << 16, magnitude = bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return bits_to_float(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  if (magnitude >= 0x400u) return bits_to_float(sign | ((magnitude + (112u << 10)) << 13));
  const float value = float(magnitude) * 0x1p-24f;  // subnormal
  return sign ? -value : value;
}
inline uint16_t float_to_fp16(float x) {  // to nearest, ties to even
  const uint32_t bits = float_to_bits(x), sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fff;
  if (magnitude >= 0x477ff000u) return uint16_t(sign | 0x7c00u);  // rounds to 65536 or more
  if (magnitude < 0x38800000u) {                                  // below 2^-14: units of 2^-24
    return uint16_t(sign | uint32_t(std::nearbyint(bits_to_float(magnitude) * 0x1p24f)));
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return uint16_t(sign | ((rounded >> 13) - (112u << 10)));
}

inline float to_float(bf16 x) { return bf16_to_float(x.bits); }
inline float to_float(fp16 x) { return fp16_to_float(x.bits); }
inline float to_float(float x) { return x; }
inline float to_float(double x) { return float(x); }
template <class T>
T from_float(float x) {
  if constexpr (std::is_same_v<T, bf16>)
    return bf16{float_to_bf16(x)};
  else if constexpr (std::is_same_v<T, fp16>)
    return fp16{float_to_fp16(x)};
  else
    return x;
}
template <class T>
uint32_t pack2(float low, float high) {
  return uint32_t(from_float<T>(low).bits) | (uint32_t(from_float<T>(high).bits) << 16);
}

template <class Params>
int launch(void (*kernel)(Params), const Params& params, int64_t blocks, int threads,
           int64_t shared_bytes, void*) {
  return emulate::run_grid([&] { kernel(params); }, blocks, threads, shared_bytes);
}

template <class Params>
int resident_blocks(void (*)(Params), int, int64_t, int64_t* blocks) {
  *blocks = 3;  // few, so that a persistent kernel gets several tiles per block
  return 0;
}

inline int copy_to_device(void* device, const void* host, int64_t bytes, void*) {
  std::memcpy(device, host, size_t(bytes));
  return 0;
}
inline int copy_to_host(void* host, const void* device, int64_t bytes, void*) {
  std::memcpy(host, device, size_t(bytes));
  return 0;
}
inline int device_architecture() { return 0; }
inline const char* runtime_error_text(int) { return emulate::last_error_text(); }

inline int zero_bytes(void* device, int64_t bytes, void*) {
  std::memset(device, 0, size_t(bytes));
  return 0;
}

}  // namespace mdcp::cuda
