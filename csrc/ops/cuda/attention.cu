// Entry points of attention: checks, then the kernel of the dtype.
#include <cstdint>

#include "attention_host.h"
#include "simt.cuh"

namespace mdcp::cuda {
namespace {

int64_t bytes_of(int64_t dtype) { return dtype == MDCP_F64 ? 8 : dtype == MDCP_F32 ? 4 : 2; }

bool rows_aligned(const MdcpRows& rows) {
  const int64_t bytes = bytes_of(rows.dtype);
  return reinterpret_cast<uintptr_t>(rows.data) % 16 == 0 && rows.row_stride * bytes % 16 == 0 &&
         rows.head_stride * bytes % 16 == 0;
}

int64_t accumulation_type(int64_t dtype) { return dtype == MDCP_F64 ? MDCP_F64 : MDCP_F32; }

bool can_hold(const MdcpRows& rows, int64_t dtype, bool accumulator_only) {
  return rows.dtype == accumulation_type(dtype) || (!accumulator_only && rows.dtype == dtype);
}

int check_options(const MdcpAttentionOptions& o) {
  if (o.dtype < MDCP_F64 || o.dtype > MDCP_F16) return MDCP_CUDA_BAD_DTYPE;
  if (o.heads < 1 || o.kv_heads < 1 || o.heads % o.kv_heads != 0) return MDCP_CUDA_BAD_ARGUMENT;
  if (o.softcap < 0 || o.dropout.probability < 0 || o.dropout.probability >= 1)
    return MDCP_CUDA_BAD_ARGUMENT;
  if (o.scalar) return o.head_dim < 1 || o.head_dim > 256 ? MDCP_CUDA_BAD_HEAD_DIM : 0;
  if (o.dtype != MDCP_BF16 && o.dtype != MDCP_F16) return MDCP_CUDA_BAD_DTYPE;
  if (padded_head_dim(o.head_dim) == 0) return MDCP_CUDA_BAD_HEAD_DIM;
  return !(o.scale > 0) || o.dropout.probability > 0 ? MDCP_CUDA_BAD_ARGUMENT : 0;
}

bool same_dtype(const MdcpAttentionOptions& o, const MdcpRows& a, const MdcpRows& b,
                const MdcpRows& c) {
  return a.dtype == o.dtype && b.dtype == o.dtype && c.dtype == o.dtype;
}

}  // namespace
}  // namespace mdcp::cuda

int mdcp_cuda_attention_forward(const MdcpAttentionForward* args, void* stream) {
  using namespace mdcp::cuda;
  const MdcpAttentionOptions& o = args->options;
  if (const int error = check_options(o)) return error;
  if (!same_dtype(o, args->q, args->k, args->v) || !can_hold(args->out, o.dtype, args->merge != 0))
    return MDCP_CUDA_BAD_DTYPE;
  if (o.scalar) return scalar_forward(*args, stream);
  for (const MdcpRows* rows : {&args->q, &args->k, &args->v, &args->out})
    if (!rows_aligned(*rows)) return MDCP_CUDA_BAD_ALIGNMENT;
  return o.dtype == MDCP_BF16 ? forward_of<bf16>(*args, stream) : forward_of<fp16>(*args, stream);
}

int mdcp_cuda_attention_backward(const MdcpAttentionBackward* args, void* stream) {
  using namespace mdcp::cuda;
  const MdcpAttentionOptions& o = args->options;
  if (const int error = check_options(o)) return error;
  if (!same_dtype(o, args->q, args->k, args->v) || args->dout.dtype != o.dtype)
    return MDCP_CUDA_BAD_DTYPE;
  for (const MdcpRows* rows : {&args->dq, &args->dk, &args->dv})
    if (!can_hold(*rows, o.dtype, args->accumulate != 0)) return MDCP_CUDA_BAD_DTYPE;
  if (o.scalar) return scalar_backward(*args, stream);
  for (const MdcpRows* rows :
       {&args->q, &args->k, &args->v, &args->dout, &args->dq, &args->dk, &args->dv})
    if (!rows_aligned(*rows)) return MDCP_CUDA_BAD_ALIGNMENT;
  const bool is_bf16 = o.dtype == MDCP_BF16;
  const int error =
      is_bf16 ? backward_kv_of<bf16>(*args, stream) : backward_kv_of<fp16>(*args, stream);
  if (error) return error;
  return is_bf16 ? backward_q_of<bf16>(*args, stream) : backward_q_of<fp16>(*args, stream);
}
