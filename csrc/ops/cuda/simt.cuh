// The few primitives that kernels are written in, so that one text compiles twice:
//  * by nvcc, for GPUs (this file, below);
//  * by g++ with -DMDCP_EMULATE, for the SIMT shim of emulate/, which runs the same kernels on
//  CPUs.
//
// Rules for a kernel: one-dimensional grid and block; one parameter struct, passed by value; shared
// memory through MDCP_DYNAMIC_SHARED / MDCP_SHARED_ARRAY; all 32 lanes of a warp take part in every
// warp operation and no thread returns before the last of them; memory is touched through plain
// pointers, copy_async_16 and load_matrix_x4 only. No torch header, no library beyond cudart.
#pragma once

#include <cstdint>

#ifdef MDCP_EMULATE
#include "emulate/simt.h"
#else

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define MDCP_KERNEL __global__
#define MDCP_DEVICE __device__ __forceinline__
#define MDCP_HOST_DEVICE __host__ __device__ __forceinline__
#define MDCP_BOUNDS(threads, blocks) __launch_bounds__(threads, blocks)
#define MDCP_UNROLL _Pragma("unroll")
// Bytes of shared memory whose size is given at launch, aligned for 16-byte accesses.
#define MDCP_DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#define MDCP_SHARED_ARRAY(type, name, count) __shared__ type name[count]

namespace mdcp::cuda {

using bf16 = __nv_bfloat16;
using fp16 = __half;

constexpr int kWarp = 32;
constexpr int64_t kMostBlocks = 1 << 16;  // of a grid over rows; further rows by striding

MDCP_DEVICE int thread_index() { return static_cast<int>(threadIdx.x); }
// Read again at each call: what is computed from it stays in no register between calls.
MDCP_DEVICE int fresh_thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;\n" : "=r"(index));
  return index;
}
MDCP_DEVICE int block_size() { return static_cast<int>(blockDim.x); }
MDCP_DEVICE int block_index() { return static_cast<int>(blockIdx.x); }
MDCP_DEVICE int block_count() { return static_cast<int>(gridDim.x); }

MDCP_DEVICE void block_sync() { __syncthreads(); }
MDCP_DEVICE void warp_sync() { __syncwarp(); }

template <class T>
MDCP_DEVICE T shuffle_xor(T value, int mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}

MDCP_DEVICE int atomic_add(int* address, int value) { return atomicAdd(address, value); }

MDCP_DEVICE int atomic_max(int* address, int value) { return atomicMax(address, value); }

// Ends the kernel with an error: for contents that the host has not seen (an index out of range).
MDCP_DEVICE void trap_unless(bool condition) {
  if (!condition) __trap();
}

MDCP_DEVICE unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Starts a copy of 16 bytes from global to shared memory; writes zeros when not `valid`
// (`global` must still be a mapped address: it is not read, but it is formed).
MDCP_DEVICE void copy_async_16(void* shared, const void* global, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(shared)),
               "l"(global), "r"(bytes)
               : "memory");
}
MDCP_DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
// Waits until at most N of this thread's committed groups are still in flight. Other threads see
// the data after the next block_sync().
template <int N>
MDCP_DEVICE void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory");
}

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
MDCP_DEVICE void load_matrix_x4(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
MDCP_DEVICE void load_matrix_x4_transposed(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// c (16x8, fp32) += a (16x16) * b (16x8), fragments as PTX lays them out.
MDCP_DEVICE void mma_16x8x16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                             bf16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
MDCP_DEVICE void mma_16x8x16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                             fp16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

MDCP_DEVICE float exp2_approx(float x) {  // ex2: 2 ulp, exp2(-inf) = 0
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

MDCP_DEVICE float reciprocal_approx(float x) {  // 1 ulp, 1 / inf = 0
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

template <class T>
MDCP_HOST_DEVICE float to_float(T x) {
  return static_cast<float>(x);
}
template <class T>
MDCP_DEVICE T from_float(float x);
template <>
MDCP_DEVICE bf16 from_float<bf16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
MDCP_DEVICE fp16 from_float<fp16>(float x) {
  return __float2half_rn(x);
}
template <>
MDCP_DEVICE float from_float<float>(float x) {
  return x;
}
template <>
MDCP_DEVICE double from_float<double>(float x) {
  return x;
}

// Two elements in one register, `low` at the lower address.
template <class T>
MDCP_DEVICE uint32_t pack2(float low, float high);
template <>
MDCP_DEVICE uint32_t pack2<bf16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <>
MDCP_DEVICE uint32_t pack2<fp16>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Host side. Every function returns a cudaError_t as int: 0, or what the runtime said (35 where
// there is no driver, 100 where there is no device).
template <class Params>
int launch(void (*kernel)(Params), const Params& params, int64_t blocks, int threads,
           int64_t shared_bytes, void* stream) {
  if (blocks <= 0) return 0;
  if (shared_bytes > 48 * 1024) {
    const cudaError_t error =
        cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                             cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes));
    if (error != cudaSuccess) {
      (void)cudaGetLastError();
      return error;
    }
  }
  void* arguments[] = {const_cast<Params*>(&params)};
  const cudaError_t error = cudaLaunchKernel(
      reinterpret_cast<const void*>(kernel), dim3(unsigned(blocks)), dim3(unsigned(threads)),
      arguments, size_t(shared_bytes), static_cast<cudaStream_t>(stream));
  if (error != cudaSuccess) (void)cudaGetLastError();  // not sticky: the next launch starts clean
  return error;
}

// Blocks that fill the device once: what a persistent kernel is launched with.
template <class Params>
int resident_blocks(void (*kernel)(Params), int threads, int64_t shared_bytes, int64_t* blocks) {
  int device = 0, processors = 0, per_processor = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess && shared_bytes > 48 * 1024)
    error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes));
  if (error == cudaSuccess)
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        &per_processor, reinterpret_cast<const void*>(kernel), threads, size_t(shared_bytes));
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    return error;
  }
  *blocks = int64_t(processors) * (per_processor > 0 ? per_processor : 1);
  return 0;
}

inline int copy_to_device(void* device, const void* host, int64_t bytes, void* stream) {
  return cudaMemcpyAsync(device, host, size_t(bytes), cudaMemcpyHostToDevice,
                         static_cast<cudaStream_t>(stream));
}
// Waits for the stream.
inline int copy_to_host(void* host, const void* device, int64_t bytes, void* stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  const cudaError_t error =
      cudaMemcpyAsync(host, device, size_t(bytes), cudaMemcpyDeviceToHost, queue);
  return error != cudaSuccess ? error : cudaStreamSynchronize(queue);
}
// As 90 for sm_90; 0 without a device.
inline int device_architecture() {
  int device = 0, major = 0, minor = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess) {
    (void)cudaGetLastError();
    return 0;
  }
  return 10 * major + minor;
}
inline const char* runtime_error_text(int code) { return cudaGetErrorString(cudaError_t(code)); }

inline int zero_bytes(void* device, int64_t bytes, void* stream) {
  return cudaMemsetAsync(device, 0, size_t(bytes), static_cast<cudaStream_t>(stream));
}

}  // namespace mdcp::cuda

#endif  // MDCP_EMULATE
