// C interface of the CUDA kernels: no torch, no C++ type. Pointers are device pointers unless their
// name says `host`; strides count elements; `stream` is a cudaStream_t. Every function returns 0 or
// a code: a cudaError_t (35: no driver; 100: no device), or one of MdcpCudaError. Nothing here
// waits for the device, allocates on it or keeps a pointer after the launch.
//
// Shape legend: Tq, Tk rows of the packed q and k; H, Hk heads; D head_dim; S segments.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum MdcpCudaError {
  MDCP_CUDA_BAD_DTYPE = 10001,      // this kernel has no such type
  MDCP_CUDA_BAD_HEAD_DIM = 10002,   // not a multiple of 8 up to 256 (scalar kernels: 1 to 256)
  MDCP_CUDA_BAD_ALIGNMENT = 10003,  // a row is not 16-byte aligned; make the tensor contiguous
  MDCP_CUDA_BAD_ARGUMENT = 10004,   // sizes or options that contradict each other
};

enum MdcpDtype { MDCP_F64 = 0, MDCP_F32 = 1, MDCP_BF16 = 2, MDCP_F16 = 3 };

// [rows, heads, D], last dimension contiguous.
typedef struct {
  void* data;
  int64_t row_stride;
  int64_t head_stride;
  int64_t dtype;
} MdcpRows;

// --- attention over a list of segments -------------------------------------------------------
//
// A segment is six int64: q_start, q_len, k_start, k_len, diagonal, window. Query q_start + i sees
// key k_start + j when j <= i + diagonal and (window < 0 or j >= i + diagonal - window).
// Segments may share q rows (their keys are one softmax) and k rows (their gradients add up).

enum MdcpAttentionPass { MDCP_FORWARD = 0, MDCP_BACKWARD_Q = 1, MDCP_BACKWARD_KV = 2 };

// Tiles of one pass, longest work first: blocks that take the next tile when they are done balance
// segments of very different sizes (LPT). One blob of bytes, copied to the device as it is; the
// offsets below are into it. It can be used again for every call with the same segments, kernel
// (dtype, head_dim, scalar) and stream.
typedef struct {
  int64_t bytes;
  int64_t segments, refs, tiles, counter;  // offsets
  int64_t tile_count;
  int64_t tile_rows;
} MdcpAttentionPlan;

// Host only. `total` is Tq, for MDCP_BACKWARD_KV Tk: rows of no segment get tiles too (zeros).
// Fills *plan and, when capacity >= plan->bytes, the blob. scalar != 0: for the one-warp-per-row
// kernels, which take every dtype and D from 1 to 256.
int mdcp_cuda_attention_plan(const int64_t* host_segments, int64_t segment_count, int64_t total_q,
                             int64_t total_k, int pass, int dtype, int head_dim, int scalar,
                             MdcpAttentionPlan* plan, void* host_blob, int64_t capacity);

// Dropout of the attention weights; a mask bit depends on (key, sample, head, q and k position)
// alone. Scalar kernels only.
typedef struct {
  double probability;  // 0: off
  uint64_t key;
  int64_t head_offset;
  const int64_t *sample_ids, *q_positions, *k_positions;  // [Tq], [Tq], [Tk]
} MdcpDropout;

typedef struct {
  double scale;    // of q k^T; the tensor-core kernels need it positive
  double softcap;  // 0: none; else softcap * tanh(scale * q k^T / softcap)
  MdcpDropout dropout;
  int64_t total_q, total_k;
  int32_t heads, kv_heads, head_dim;
  int32_t dtype;   // of q, k, v
  int32_t scalar;  // which kernels
} MdcpAttentionOptions;

typedef struct {
  MdcpAttentionOptions options;
  MdcpRows q, k, v;  // [Tq, H, D], [Tk, Hk, D], [Tk, Hk, D]
  MdcpRows out;      // [Tq, H, D]: dtype of q or accumulation type (must be, to merge)
  void* lse;         // [H, Tq] natural log, accumulation type: float, double for F64
  int64_t lse_head_stride;
  MdcpAttentionPlan plan;  // MDCP_FORWARD
  void* plan_blob;
  int64_t merge;  // 1: (out, lse) hold the result of earlier keys, which joins
} MdcpAttentionForward;

// A row that sees no key gets out 0 and lse -inf; when merging it stays as it is.
int mdcp_cuda_attention_forward(const MdcpAttentionForward* args, void* stream);

typedef struct {
  MdcpAttentionOptions options;
  MdcpRows q, k, v, dout;  // dout in the dtype of q
  MdcpRows dq, dk, dv;     // dtype of q or accumulation type (must be, to accumulate)
  const void* lse;         // [H, Tq], over all keys that the row saw in all steps
  const void* delta;       // [H, Tq], from mdcp_cuda_attention_delta
  int64_t lse_head_stride, delta_head_stride;
  MdcpAttentionPlan q_plan, kv_plan;
  void *q_plan_blob, *kv_plan_blob;
  int64_t accumulate;  // 1: added to dq, dk, dv in a fixed order; 0: overwrites them
} MdcpAttentionBackward;

// Deterministic: dq by query tile, dk and dv by key tile (all query heads of the KV head in one
// block), no atomic addition anywhere.
int mdcp_cuda_attention_backward(const MdcpAttentionBackward* args, void* stream);

typedef struct {
  MdcpRows out, dout;  // [Tq, H, D]
  const void* dlse;    // [H, Tq] or null
  void* delta;         // [H, Tq]: sum over D of out * dout, minus dlse; accumulation type
  int64_t dlse_head_stride, delta_head_stride, rows;
  int32_t heads, head_dim;
} MdcpAttentionDelta;

int mdcp_cuda_attention_delta(const MdcpAttentionDelta* args, void* stream);

// --- rows and heads that move -------------------------------------------------------------------
//
// Contents that the host cannot see (an index or label out of range, cu_seqlens that decrease) end
// the kernel with a trap; the next synchronisation of the device reports it.

// cu [samples + 1] int64. index, positions [total]; cu_rank [degree, samples + 1], all int64. Chunk
// c of a sample of L tokens is [floor(c L / 2d), floor((c + 1) L / 2d)); rank r holds chunks r and
// 2d - 1 - r. Places after the last token get index -1 and position 0.
int mdcp_cuda_zigzag(const int64_t* cu, int64_t samples, int64_t degree, int64_t total,
                     int64_t* index, int64_t* positions, int64_t* cu_rank, void* stream);

// out[i] = x[index[i]], zeros where the index is -1.
int mdcp_cuda_gather_rows(void* out, const void* x, const int64_t* index, int64_t count,
                          int64_t x_rows, int64_t row_bytes, void* stream);

// out[index[i]] += x[i] in the order of i; out has been zeroed. scratch: 2 * rows int32.
int mdcp_cuda_scatter_rows(void* out, const void* x, const int64_t* index, int64_t count,
                           int64_t rows, int64_t width, int dtype, int32_t* scratch, void* stream);

// buffer [degree, T, H/d + 2 kv, D] against q [T, H, D], k and v [T, Hk, D]; kv = max(1, Hk/d).
// With kv_heads 0 there are no k and v: the split and join of one tensor.
typedef struct {
  MdcpRows q, k, v;
  void* buffer;
  int64_t tokens, degree, heads, kv_heads, dim;
} MdcpHeads;

int mdcp_cuda_ulysses_pack(const MdcpHeads* args, void* stream);
int mdcp_cuda_ulysses_unpack(const MdcpHeads* args, void* stream);  // adds copies of a KV head

// Zeros the rows from cu[samples], read on the device, to `rows`.
int mdcp_cuda_zero_padding(void* x, int64_t rows, int64_t row_bytes, const int64_t* cu,
                           int64_t samples, void* stream);

// --- row-wise arithmetic -------------------------------------------------------------------------

typedef struct {  // [H, T]
  void* data;
  int64_t head_stride, row_stride;
} MdcpStat;

typedef struct {
  MdcpRows out_a, out_b, out;  // one dtype
  MdcpStat lse_a, lse_b, lse;
  int64_t rows, heads, dim;
} MdcpMerge;

typedef struct {
  MdcpMerge forward;  // without out and lse
  MdcpRows dout, dout_a, dout_b;
  MdcpStat dlse, dlse_a, dlse_b;  // dlse.data may be null
} MdcpMergeGrad;

int mdcp_cuda_merge_lse(const MdcpMerge* args, void* stream);
int mdcp_cuda_merge_lse_grad(const MdcpMergeGrad* args, void* stream);

typedef struct {
  MdcpRows x, out;
  const int64_t* positions;   // [tokens]
  const double* frequencies;  // [pairs], radians per position
  double scale;               // of cos and sin
  int64_t tokens, heads, dim, pairs, interleaved, inverse;
} MdcpRope;

int mdcp_cuda_rope(const MdcpRope* args, void* stream);

typedef struct {
  const void* logits;     // [tokens, vocab]
  const int64_t* labels;  // [tokens]; negative: ignored
  const void* weights;    // [tokens] accumulation type, or null
  void* lse;              // [tokens] accumulation type
  double* losses;         // [tokens] scratch, weighted
  void* loss;             // accumulation type: their sum
  int64_t tokens, vocab, row_stride, dtype;
} MdcpCrossEntropy;

typedef struct {
  MdcpCrossEntropy forward;  // without losses and loss
  const void* dloss;         // accumulation type, on the device
  const void* dlse;          // [tokens] or null
  void* dlogits;             // [tokens, vocab], contiguous
} MdcpCrossEntropyGrad;

int mdcp_cuda_cross_entropy(const MdcpCrossEntropy* args, void* stream);
int mdcp_cuda_cross_entropy_grad(const MdcpCrossEntropyGrad* args, void* stream);

// --- for the glue
// ---------------------------------------------------------------------------------

int mdcp_cuda_to_device(void* device, const void* host, int64_t bytes, void* stream);
int mdcp_cuda_to_host(void* host, const void* device, int64_t bytes, void* stream);  // waits
int mdcp_cuda_architecture(void);  // of the current device, as 90; 0: none
const char* mdcp_cuda_error_text(int code);

#ifdef __cplusplus
}
#endif
