// From torch tensors to the C interface of the CUDA kernels (stable ABI, torch >= 2.10).
//
// Compiled with -DMDCP_EMULATE the same text registers the emulated kernels for CPU tensors, in a
// namespace of their own, so that tests run the glue as well.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "api.h"

#ifdef MDCP_EMULATE
#define MDCP_CUDA_LIBRARY(m) STABLE_TORCH_LIBRARY_IMPL(megatron_dcp_shim, CPU, m)
#else
#define MDCP_CUDA_LIBRARY(m) STABLE_TORCH_LIBRARY_IMPL(megatron_dcp, CUDA, m)
#endif

namespace mdcp::cuda::glue {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

// The device and stream of one op call. Throws when there is no device to run on.
class Call {
 public:
  Call(const char* op, const Tensor& reference);

  const char* op() const { return op_; }
  void* stream() const { return stream_; }
  // A new tensor beside the reference.
  Tensor empty(std::vector<int64_t> sizes, ScalarType type) const;
  // Throws for a code other than 0, naming the op, `shapes`, the device and what was built.
  void check(int code, const std::string& shapes) const;
  // Throws unless `t` lies beside the reference.
  void check_device(const Tensor& t, const char* name) const;
  // The integers of an int32 or int64 tensor on the host or (waiting for the stream) the device.
  std::vector<int64_t> integers(const Tensor& t, const char* name) const;
  // A contiguous int64 tensor on the device with the same values (itself where it is one).
  Tensor indices(const Tensor& t, int64_t count, const char* name) const;

 private:
  const char* op_;
  const Tensor& reference_;
#ifndef MDCP_EMULATE
  torch::stable::accelerator::DeviceGuard guard_;
#endif
  void* stream_ = nullptr;
};

int dtype_of(const Tensor& t, const char* name);
ScalarType accumulation_type(int dtype);
ScalarType scalar_type_of(int dtype);

// A [rows, heads, dim] tensor with unit stride in dim.
MdcpRows rows_of(const Call& call, const Tensor& t, const char* name);
// A [heads, rows] statistic in the accumulation type of `dtype`.
MdcpStat stat_of(const Call& call, const Tensor& t, int dtype, int64_t heads, int64_t rows,
                 const char* name);
// `t` with unit stride, 16-byte rows and scalar type `type`: itself, or a contiguous copy.
Tensor loadable(const Call& call, const Tensor& t, ScalarType type);
std::string shape_text(const Tensor& t);

}  // namespace mdcp::cuda::glue
