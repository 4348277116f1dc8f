#include "glue.h"

#include <atomic>

namespace mdcp::glue {
namespace {

std::string name_of(ScalarType type) {
  switch (type) {
    case ScalarType::Double:
      return "float64";
    case ScalarType::Float:
      return "float32";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Bool:
      return "bool";
    default:
      return "dtype number " + std::to_string(static_cast<int>(type));
  }
}

}  // namespace

std::string text_of(const Tensor& t) {
  std::string text = name_of(t.scalar_type()) + " [";
  for (int64_t d = 0; d < t.dim(); ++d) text += (d ? ", " : "") + std::to_string(t.size(d));
  return text + "]" + (t.is_contiguous() ? "" : ", not contiguous");
}

DType float_type(const Tensor& t, const char* name) {
  switch (t.scalar_type()) {
    case ScalarType::Double:
      return DType::kFloat64;
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Half:
      return DType::kFloat16;
    default:
      break;
  }
  STD_TORCH_CHECK(false, name, " must be float64, float32, bfloat16 or float16; got ", text_of(t),
                  ". Convert it before the call.");
}

Rows rows_of(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.dim() == 3, name, " must be [tokens, heads, dim]; got ", t.dim(),
                  " dimensions.");
  STD_TORCH_CHECK(t.is_cpu(), name, " must be on the CPU for this kernel.");
  STD_TORCH_CHECK(t.numel() == 0 || t.size(2) == 1 || t.stride(2) == 1, name,
                  " must have unit stride in its last dimension; got stride ", t.stride(2),
                  ". Call .contiguous() first.");
  return Rows{t.data_ptr(), float_type(t, name), t.stride(0), t.stride(1)};
}

Stat stat_of(const Tensor& t, DType reference, int64_t heads, int64_t rows, const char* name) {
  STD_TORCH_CHECK(t.dim() == 2 && t.size(0) == heads && t.size(1) == rows, name,
                  " must be [heads, tokens] = [", heads, ", ", rows, "]; got ", text_of(t), ".");
  STD_TORCH_CHECK(t.scalar_type() == accumulation_type(reference), name,
                  " must be float32 (float64 for float64 inputs); got ", text_of(t), ".");
  return Stat{t.data_ptr(), t.stride(0), t.stride(1)};
}

std::vector<int64_t> integers_of(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.is_cpu(), name, " must be on the CPU for this kernel.");
  STD_TORCH_CHECK(t.is_contiguous(), name, " must be contiguous; got ", text_of(t), ".");
  const int64_t n = t.numel();
  std::vector<int64_t> values(n);
  if (t.scalar_type() == ScalarType::Int) {
    const auto* p = static_cast<const int32_t*>(t.data_ptr());
    for (int64_t i = 0; i < n; ++i) values[i] = p[i];
  } else {
    STD_TORCH_CHECK(t.scalar_type() == ScalarType::Long, name, " must be int32 or int64; got ",
                    text_of(t), ".");
    const auto* p = static_cast<const int64_t*>(t.data_ptr());
    for (int64_t i = 0; i < n; ++i) values[i] = p[i];
  }
  return values;
}

const int64_t* indices_of(const Tensor& t, int64_t count, const char* name) {
  STD_TORCH_CHECK(t.is_cpu() && t.is_contiguous() && t.scalar_type() == ScalarType::Long &&
                      t.dim() == 1 && t.size(0) == count,
                  name, " must be a contiguous 1-D int64 CPU tensor of ", count, " elements; got ",
                  text_of(t), ".");
  return static_cast<const int64_t*>(t.data_ptr());
}

Tensor empty_cpu(std::initializer_list<int64_t> sizes, ScalarType type) {
  const std::vector<int64_t> shape(sizes);
  return torch::stable::empty(shape, type, std::nullopt,
                              torch::stable::Device(torch::headeronly::DeviceType::CPU));
}

Parallel pool(int64_t work) {
  constexpr int64_t kWorthIt = 200000;
  Parallel parallel;
  if (work < kWorthIt) {
    parallel.run = [](int64_t count, void (*body)(int64_t, void*), void* context) {
      for (int64_t i = 0; i < count; ++i) body(i, context);
    };
    return parallel;
  }
  parallel.threads = torch::stable::get_num_threads();
  parallel.run = [](int64_t count, void (*body)(int64_t, void*), void* context) {
    if (count == 0) return;
    std::atomic<int64_t> next{0};
    const int64_t threads = torch::stable::get_num_threads();
    auto drain = [&](int64_t, int64_t) {
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
        body(i, context);
      }
    };
    torch::stable::parallel_for(0, threads < count ? threads : count, 1, drain);
  };
  return parallel;
}

}  // namespace mdcp::glue
