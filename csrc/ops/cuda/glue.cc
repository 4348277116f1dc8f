#include "glue.h"

#include <cstring>

#ifndef MDCP_EMULATE
#include <dlfcn.h>
#endif

#ifndef MDCP_CUDA_BUILT_FOR
#define MDCP_CUDA_BUILT_FOR "the SIMT shim"
#endif

namespace mdcp::cuda::glue {
namespace {

#ifndef MDCP_EMULATE
// The current stream of torch, as a cudaStream_t. The function lives in torch's CUDA half, which a
// CPU build of torch lacks: looked up at run time, so that this library loads with either.
void* current_stream(int32_t device) {
  using Function = int32_t (*)(int32_t, void**);
  static const auto function =
      reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, "aoti_torch_get_current_cuda_stream"));
  STD_TORCH_CHECK(function != nullptr,
                  "this torch has no CUDA (aoti_torch_get_current_cuda_stream was not found). "
                  "Install a CUDA build of torch 2.10 or newer.");
  void* stream = nullptr;
  STD_TORCH_CHECK(function(device, &stream) == 0, "torch gave no current CUDA stream for device ",
                  device, ".");
  return stream;
}
#endif

}  // namespace

#ifdef MDCP_EMULATE
Call::Call(const char* op, const Tensor& reference) : op_(op), reference_(reference) {}
#else
Call::Call(const char* op, const Tensor& reference)
    : op_(op),
      reference_(reference),
      guard_(reference.get_device_index()),
      stream_(current_stream(reference.get_device_index())) {}
#endif

Tensor Call::empty(std::vector<int64_t> sizes, ScalarType type) const {
  return torch::stable::empty(sizes, type, std::nullopt, reference_.device());
}

void Call::check(int code, const std::string& shapes) const {
  if (code == 0) return;
  const int architecture = mdcp_cuda_architecture();
  STD_TORCH_CHECK(false, "megatron_dcp::", op_, " failed on ", shapes, ": ",
                  mdcp_cuda_error_text(code), " (code ", code,
                  "). Device: ", architecture == 0 ? "none" : "sm_" + std::to_string(architecture),
                  "; kernels were built for " MDCP_CUDA_BUILT_FOR ".");
}

void Call::check_device(const Tensor& t, const char* name) const {
  STD_TORCH_CHECK(
      t.is_cpu() == reference_.is_cpu() && t.get_device_index() == reference_.get_device_index(),
      "megatron_dcp::", op_, ": ", name, " must be on the device of the other tensors.");
}

std::vector<int64_t> Call::integers(const Tensor& t, const char* name) const {
  const bool wide = t.scalar_type() == ScalarType::Long;
  STD_TORCH_CHECK(wide || t.scalar_type() == ScalarType::Int, name, " must be int32 or int64.");
  STD_TORCH_CHECK(t.is_contiguous(), name, " must be contiguous.");
  const int64_t count = t.numel(), bytes = count * (wide ? 8 : 4);
  std::vector<int64_t> values(count);
  std::vector<int32_t> narrow(wide ? 0 : count);
  void* target = wide ? static_cast<void*>(values.data()) : narrow.data();
  if (t.is_cpu()) {
    if (bytes > 0) std::memcpy(target, t.data_ptr(), bytes);
  } else {
    check(mdcp_cuda_to_host(target, t.data_ptr(), bytes, stream_), name);
  }
  for (size_t i = 0; i < narrow.size(); ++i) values[i] = narrow[i];
  return values;
}

Tensor Call::indices(const Tensor& t, int64_t count, const char* name) const {
  STD_TORCH_CHECK(t.dim() == 1 && t.size(0) == count, name, " must be a 1-D tensor of ", count,
                  " elements; got ", shape_text(t), ".");
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Long || t.scalar_type() == ScalarType::Int, name,
                  " must be int64 or int32.");
  if (t.scalar_type() == ScalarType::Long && t.is_contiguous() && t.is_cpu() == reference_.is_cpu())
    return t;
  Tensor copy = empty({count}, ScalarType::Long);
  torch::stable::copy_(copy, t);
  return copy;
}

int dtype_of(const Tensor& t, const char* name) {
  switch (t.scalar_type()) {
    case ScalarType::Double:
      return MDCP_F64;
    case ScalarType::Float:
      return MDCP_F32;
    case ScalarType::BFloat16:
      return MDCP_BF16;
    case ScalarType::Half:
      return MDCP_F16;
    default:
      break;
  }
  STD_TORCH_CHECK(false, name, " must be float64, float32, bfloat16 or float16; got dtype number ",
                  static_cast<int>(t.scalar_type()), ". Convert it before the call.");
}

ScalarType accumulation_type(int dtype) {
  return dtype == MDCP_F64 ? ScalarType::Double : ScalarType::Float;
}

ScalarType scalar_type_of(int dtype) {
  switch (dtype) {
    case MDCP_F64:
      return ScalarType::Double;
    case MDCP_F32:
      return ScalarType::Float;
    case MDCP_BF16:
      return ScalarType::BFloat16;
    default:
      return ScalarType::Half;
  }
}

MdcpRows rows_of(const Call& call, const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.dim() == 3, name, " must be [tokens, heads, dim]; got ", shape_text(t), ".");
  call.check_device(t, name);
  STD_TORCH_CHECK(t.size(2) <= 1 || t.stride(2) == 1, name,
                  " must have unit stride in its last dimension; got stride ", t.stride(2),
                  ". Call .contiguous() first.");
  return {t.data_ptr(), t.stride(0), t.stride(1), dtype_of(t, name)};
}

MdcpStat stat_of(const Call& call, const Tensor& t, int dtype, int64_t heads, int64_t rows,
                 const char* name) {
  STD_TORCH_CHECK(t.dim() == 2 && t.size(0) == heads && t.size(1) == rows, name,
                  " must be [heads, tokens] = [", heads, ", ", rows, "]; got ", shape_text(t), ".");
  STD_TORCH_CHECK(t.scalar_type() == accumulation_type(dtype), name,
                  " must be float32 (float64 for float64 inputs).");
  call.check_device(t, name);
  return {t.data_ptr(), t.stride(0), t.stride(1)};
}

Tensor loadable(const Call& call, const Tensor& t, ScalarType type) {
  const int64_t size = static_cast<int64_t>(t.element_size());
  const bool fits = t.scalar_type() == type && (t.size(2) <= 1 || t.stride(2) == 1) &&
                    reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0 &&
                    t.stride(0) * size % 16 == 0 && t.stride(1) * size % 16 == 0;
  if (fits) return t;
  Tensor copy = call.empty({t.size(0), t.size(1), t.size(2)}, type);
  torch::stable::copy_(copy, t);
  return copy;
}

std::string shape_text(const Tensor& t) {
  std::string text = "[";
  for (int64_t d = 0; d < t.dim(); ++d) text += (d ? ", " : "") + std::to_string(t.size(d));
  return text + "]";
}

}  // namespace mdcp::cuda::glue
