// What the host side of the attention kernels shares: tile sizes, and the functions that the .cu
// files instantiate.
#pragma once

#include <type_traits>

#include "api.h"

namespace mdcp::cuda {

constexpr int kScalarTileRows = 32;

// The width that a head dim is padded to (with zeros, in shared memory only), or 0.
constexpr int padded_head_dim(int head_dim) {
  if (head_dim <= 0 || head_dim % 8 != 0 || head_dim > 256) return 0;
  return head_dim <= 64 ? 64 : head_dim <= 96 ? 96 : head_dim <= 128 ? 128 : 256;
}

// Rows of one tile of the tensor-core kernels.
constexpr int tile_rows_of(int pass, int padded_dim) {
  if (pass == MDCP_FORWARD) return padded_dim <= 128 ? 128 : 64;
  return 64;
}

template <class T>
int forward_of(const MdcpAttentionForward& args, void* stream);
template <class T>
int backward_q_of(const MdcpAttentionBackward& args, void* stream);
template <class T>
int backward_kv_of(const MdcpAttentionBackward& args, void* stream);

int scalar_forward(const MdcpAttentionForward& args, void* stream);
int scalar_backward(const MdcpAttentionBackward& args, void* stream);

}  // namespace mdcp::cuda
