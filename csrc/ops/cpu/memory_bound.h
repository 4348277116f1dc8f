// The memory-bound ops on CPUs: kernels over raw pointers, no torch.
#pragma once

#include "attention.h"

namespace mdcp {

// ---- zigzag: chunk c of a sample of L tokens is [floor(c L / 2d), floor((c + 1) L / 2d)); rank r
// holds chunks r and 2d - 1 - r of every sample. Any length, no padding.

struct ZigzagOut {
  int64_t* index;      // [total]: packed row of each place, rank by rank, sample by sample
  int64_t* positions;  // [total]: position of that row inside its sample
  int64_t* cu_rank;    // [degree, samples + 1]: each rank's own cu_seqlens
};
// Places after the last token hold -1.
void zigzag(const int64_t* cu, int64_t samples, int64_t degree, int64_t total,
            const ZigzagOut& out);

// ---- rows of `bytes` bytes

// out[i] = x[index[i]], zeros where the index is -1.
void gather_rows(char* out, const char* x, const int64_t* index, int64_t count, int64_t bytes,
                 const Parallel& parallel);
// out[index[i]] += x[i] in the order of i; out has been zeroed.
void scatter_rows(void* out, const void* x, DType dtype, const int64_t* index, int64_t count,
                  int64_t width, const Parallel& parallel);

// ---- head all-to-all

// Copies [count] blocks: block b of `width` elements from source(b) to target(b) is up to callers;
// here: tokens x heads x dim slices between (token, head) layouts.
struct HeadCopy {
  const char* source;
  char* target;
  int64_t tokens, heads, head_bytes;
  int64_t source_token, source_head, target_token, target_head;  // strides in bytes
};
void copy_heads(const HeadCopy& copy, const Parallel& parallel);

// target[token, head] = sum over r < replicas of source[r] (source_replica bytes apart).
void sum_heads(const HeadCopy& copy, DType dtype, int64_t dim, int64_t replicas,
               int64_t source_replica, const Parallel& parallel);

// ---- merge of two partial results

struct MergeArgs {
  Shape shape;  // total_q, heads, dim
  Rows out_a, out_b, out;
  Stat lse_a, lse_b, lse;
};
void merge_lse(const MergeArgs& args, const Parallel& parallel);

struct MergeGradArgs {
  MergeArgs forward;
  Rows dout, dout_a, dout_b;
  Stat dlse, dlse_a, dlse_b;  // dlse.data may be null
};
void merge_lse_grad(const MergeGradArgs& args, const Parallel& parallel);

// ---- RoPE

struct RopeArgs {
  int64_t tokens, heads, dim, pairs;
  Rows x, out;
  const int64_t* positions;
  const double* frequencies;  // [pairs], radians per position
  double scale;               // of cos and sin (YaRN's attention factor)
  bool interleaved, inverse;
};
void rope(const RopeArgs& args, const Parallel& parallel);

// ---- cross-entropy

struct CrossEntropyArgs {
  int64_t tokens, vocab;
  DType dtype;
  const void* logits;  // [tokens, vocab]
  int64_t row_stride;
  const int64_t* labels;  // [tokens]; negative: the token is ignored
  const void* weights;    // [tokens] accumulation type, or null
  void* lse;              // [tokens] accumulation type
  double* losses;         // [tokens], weighted
};
void cross_entropy(const CrossEntropyArgs& args, const Parallel& parallel);
// dlogits = dloss * weight * (softmax - onehot) + dlse * softmax; dlse [tokens] may be null.
void cross_entropy_grad(const CrossEntropyArgs& args, double dloss, const void* dlse, void* dlogits,
                        const Parallel& parallel);

}  // namespace mdcp
