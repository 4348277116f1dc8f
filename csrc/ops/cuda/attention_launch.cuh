// The kernel of a head dim. Each .cu instantiates one pass for one dtype, so that they compile in
// parallel.
#pragma once

#include "attention_host.h"
#include "attention_view.cuh"

namespace mdcp::cuda {

template <class Function>
int by_head_dim(int head_dim, const Function& function) {
  switch (padded_head_dim(head_dim)) {
    case 64:
      return function(std::integral_constant<int, 64>());
    case 96:
      return function(std::integral_constant<int, 96>());
    case 128:
      return function(std::integral_constant<int, 128>());
    case 256:
      return function(std::integral_constant<int, 256>());
    default:
      return MDCP_CUDA_BAD_HEAD_DIM;
  }
}

}  // namespace mdcp::cuda
