// Checks and small tensor helpers shared by the op registrations (stable ABI, torch >= 2.10).
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cpu/attention.h"

namespace mdcp::glue {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// A tensor in an error message: "float32 [6, 2, 16]".
std::string text_of(const Tensor& t);

// Storage type of a float tensor, or an error naming the argument.
DType float_type(const Tensor& t, const char* name);

inline ScalarType accumulation_type(DType t) {
  return t == DType::kFloat64 ? ScalarType::Double : ScalarType::Float;
}

// A view of a [rows, heads, dim] tensor with unit stride in dim.
Rows rows_of(const Tensor& t, const char* name);

// A view of a [heads, rows] tensor in the accumulation type of `reference`.
Stat stat_of(const Tensor& t, DType reference, int64_t heads, int64_t rows, const char* name);

// The integers of a 1-D or 2-D int32/int64 CPU tensor, as int64.
std::vector<int64_t> integers_of(const Tensor& t, const char* name);

// The data of a contiguous 1-D int64 tensor of `count` elements.
const int64_t* indices_of(const Tensor& t, int64_t count, const char* name);

Tensor empty_cpu(std::initializer_list<int64_t> sizes, ScalarType type);

// Draws task numbers from one counter on every thread of torch's pool; on the calling thread alone
// when `work`, in multiply-adds or elements, is not worth waking the others.
Parallel pool(int64_t work);

}  // namespace mdcp::glue
