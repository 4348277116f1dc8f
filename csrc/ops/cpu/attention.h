// Segment attention on CPUs: arguments, task plan and entry points. No torch in this header.
//
// A segment is a rectangle of the packed q and k with a band of visible pairs. Local row i of
// q_len and local key j of k_len see each other when
//     j <= i + diagonal   and   (window < 0 or j >= i + diagonal - window).
// Segments of one call may share q rows (their keys are then one softmax) and k rows (their
// gradients are summed). Contributions are always taken in the order of the segment list, so the
// bits of a result depend neither on the number of threads nor on what else is packed beside it.
#pragma once

#include <cstdint>
#include <vector>

namespace mdcp {

enum class DType : int { kFloat64, kFloat32, kBFloat16, kFloat16 };

inline int64_t element_bytes(DType t) {
  return t == DType::kFloat64 ? 8 : (t == DType::kFloat32 ? 4 : 2);
}

// A [rows, heads, dim] tensor with unit stride in dim; the other strides are in elements.
struct Rows {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t row_stride = 0;
  int64_t head_stride = 0;

  void* at(int64_t row, int64_t head) const {
    return static_cast<char*>(data) +
           (row * row_stride + head * head_stride) * element_bytes(dtype);
  }
};

// A [heads, rows] statistic (lse, delta) in the accumulation type.
struct Stat {
  void* data = nullptr;
  int64_t head_stride = 0;
  int64_t row_stride = 1;
};

struct Segment {
  int64_t q_start, q_len, k_start, k_len, diagonal, window;

  int64_t first_key(int64_t i) const {
    if (window < 0) return 0;
    int64_t lo = i + diagonal - window;
    return lo > 0 ? lo : 0;
  }
  // One past the last visible key; not more than k_len, may be <= first_key(i) (nothing visible).
  int64_t last_key(int64_t i) const {
    int64_t hi = i + diagonal + 1;
    return hi < k_len ? hi : k_len;
  }
  // The same band seen from local key j: rows [first_row, last_row).
  int64_t first_row(int64_t j) const {
    int64_t lo = j - diagonal;
    return lo > 0 ? lo : 0;
  }
  int64_t last_row(int64_t j) const {
    if (window < 0) return q_len;
    int64_t hi = j - diagonal + window + 1;
    return hi < q_len ? hi : q_len;
  }
};

// Counter-based dropout: the random word of a pair depends on (key, sample, head, q position,
// k position) alone, so every shard of a sample draws the same mask. Off when probability == 0.
struct Dropout {
  double probability = 0.0;
  uint64_t key = 0;
  int64_t head_offset = 0;               // global index of head 0 of these tensors
  const int64_t* sample_ids = nullptr;   // [total_q]
  const int64_t* q_positions = nullptr;  // [total_q]
  const int64_t* k_positions = nullptr;  // [total_k]
};

struct Shape {
  int64_t total_q = 0, total_k = 0, heads = 0, kv_heads = 0, dim = 0;
};

struct Options {
  double scale = 1.0;
  double softcap = 0.0;  // 0: off
  Dropout dropout;
};

struct ForwardArgs {
  Shape shape;
  Options options;
  Rows q, k, v, out;  // out: accumulation type when merging, else that or the type of q
  Stat lse;
  bool merge = false;  // continue from (out, lse) instead of overwriting them
};

struct BackwardArgs {
  Shape shape;
  Options options;
  Rows q, k, v, out, dout;
  Rows dq, dk, dv;        // accumulated: accumulation type; else that or the type of q
  Stat lse, dlse, delta;  // dlse.data may be null; delta is scratch, written here
  bool accumulate = false;
};

// A run of rows that share one list of segments: refs[first_ref .. last_ref) index the segments.
// Runs cover every row; a run without segments is a gap.
struct Run {
  int64_t start, len;
  int32_t first_ref, last_ref;
};

struct Axis {
  std::vector<Run> runs;
  std::vector<int32_t> refs;
};

struct SegmentList {
  std::vector<Segment> segments;
  Axis q, k;
};

// Builds the runs of both axes and cuts far bands to the rectangle. `rows` is [count, 6]; starts
// and lengths must have been checked.
SegmentList make_segments(const int64_t* rows, int64_t count, int64_t total_q, int64_t total_k);

// Runs body(i, context) for i in [0, count), in parallel; supplied by the torch glue.
struct Parallel {
  int64_t threads = 1;
  void (*run)(int64_t count, void (*body)(int64_t, void*), void* context) = nullptr;

  template <class F>
  void operator()(int64_t count, const F& f) const {
    run(
        count, [](int64_t i, void* context) { (*static_cast<const F*>(context))(i); },
        const_cast<void*>(static_cast<const void*>(&f)));
  }
};

// Plain loops, templated on the accumulation type: the float64 path and the check of the others.
void scalar_forward(const ForwardArgs& args, const SegmentList& list, const Parallel& parallel);
void scalar_backward(const BackwardArgs& args, const SegmentList& list, const Parallel& parallel);

}  // namespace mdcp
