// Schemas and CPU glue of the attention ops. Contracts: megatron_dcp/ops/__init__.py.
#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#include "cpu/paths.h"
#include "glue.h"

namespace mdcp {
namespace {

using namespace glue;
using Three = std::tuple<Tensor, Tensor, Tensor>;
using MaybeTensor = std::optional<Tensor>;

constexpr int64_t kMaxDim = 256;

struct Inputs {
  Shape shape;
  Rows q, k, v;
  DType dtype;
};

Inputs check_inputs(const Tensor& q, const Tensor& k, const Tensor& v) {
  Inputs in;
  in.q = rows_of(q, "q");
  in.k = rows_of(k, "k");
  in.v = rows_of(v, "v");
  in.dtype = in.q.dtype;
  STD_TORCH_CHECK(in.k.dtype == in.dtype && in.v.dtype == in.dtype,
                  "q, k and v must have one dtype; got ", text_of(q), ", ", text_of(k), " and ",
                  text_of(v), ".");
  in.shape = {q.size(0), k.size(0), q.size(1), k.size(1), q.size(2)};
  const Shape& s = in.shape;
  STD_TORCH_CHECK(
      v.size(0) == s.total_k && v.size(1) == s.kv_heads && v.size(2) == s.dim && k.size(2) == s.dim,
      "k and v must be [", s.total_k, ", ", s.kv_heads, ", ", s.dim, "] (the dim of q); got k dim ",
      k.size(2), " and v [", v.size(0), ", ", v.size(1), ", ", v.size(2), "].");
  STD_TORCH_CHECK(s.kv_heads > 0 && s.heads > 0 && s.heads % s.kv_heads == 0,
                  "the query heads must be a multiple of the KV heads; got ", s.heads, " and ",
                  s.kv_heads, ".");
  STD_TORCH_CHECK(s.dim > 0 && s.dim <= kMaxDim, "head dim must be 1 to ", kMaxDim, "; got ", s.dim,
                  ".");
  return in;
}

Rows check_like(const Tensor& t, const Shape& s, bool query, DType dtype, bool accumulator_only,
                const char* name) {
  Rows rows = rows_of(t, name);
  const int64_t total = query ? s.total_q : s.total_k, heads = query ? s.heads : s.kv_heads;
  STD_TORCH_CHECK(t.size(0) == total && t.size(1) == heads && t.size(2) == s.dim, name,
                  " must be [", total, ", ", heads, ", ", s.dim, "]; got [", t.size(0), ", ",
                  t.size(1), ", ", t.size(2), "].");
  const DType accumulator = dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  STD_TORCH_CHECK(rows.dtype == accumulator || (!accumulator_only && rows.dtype == dtype), name,
                  accumulator_only ? " must be float32 (float64 for float64 inputs); got "
                                   : " must have the dtype of q or its accumulation type; got ",
                  text_of(t), ".");
  return rows;
}

Options check_options(const Shape& s, double scale, double softcap, double dropout_p,
                      int64_t rng_key, const MaybeTensor& sample_ids,
                      const MaybeTensor& q_positions, const MaybeTensor& k_positions,
                      int64_t head_offset) {
  STD_TORCH_CHECK(softcap >= 0, "softcap must be 0 (off) or positive; got ", softcap, ".");
  STD_TORCH_CHECK(dropout_p >= 0 && dropout_p < 1, "dropout_p must be in [0, 1); got ", dropout_p,
                  ".");
  Options options{scale, softcap, {}};
  if (dropout_p == 0) return options;
  STD_TORCH_CHECK(sample_ids && q_positions && k_positions,
                  "dropout needs sample_ids, q_positions and k_positions: masks belong to the "
                  "sample, not to the rank. Pass the three int64 tensors.");
  options.dropout = {dropout_p,
                     static_cast<uint64_t>(rng_key),
                     head_offset,
                     indices_of(*sample_ids, s.total_q, "sample_ids"),
                     indices_of(*q_positions, s.total_q, "q_positions"),
                     indices_of(*k_positions, s.total_k, "k_positions")};
  return options;
}

SegmentList check_segments(const std::vector<int64_t>& rows, const Shape& s) {
  for (size_t i = 0; i < rows.size(); i += 6) {
    const int64_t* r = rows.data() + i;
    STD_TORCH_CHECK(r[0] >= 0 && r[1] >= 0 && r[1] <= s.total_q && r[0] <= s.total_q - r[1] &&
                        r[2] >= 0 && r[3] >= 0 && r[3] <= s.total_k && r[2] <= s.total_k - r[3],
                    "segment ", i / 6, " (q_start ", r[0], ", q_len ", r[1], ", k_start ", r[2],
                    ", k_len ", r[3], ") leaves q of ", s.total_q, " rows or k of ", s.total_k,
                    " rows.");
  }
  return make_segments(rows.data(), static_cast<int64_t>(rows.size() / 6), s.total_q, s.total_k);
}

SegmentList check_segments(const Tensor& segments, const Shape& s) {
  STD_TORCH_CHECK(segments.dim() == 2 && segments.size(1) == 6,
                  "segments must be [count, 6]: q_start, q_len, k_start, k_len, diagonal, window; "
                  "got ",
                  text_of(segments), ".");
  return check_segments(integers_of(segments, "segments"), s);
}

// The band of the ecosystem's (causal, window_size) convention, aligned to the bottom right.
SegmentList varlen_segments(const Tensor& cu_q, const Tensor& cu_k, const Shape& s, bool causal,
                            int64_t left, int64_t right) {
  const std::vector<int64_t> q = integers_of(cu_q, "cu_seqlens_q");
  const std::vector<int64_t> k = integers_of(cu_k, "cu_seqlens_k");
  STD_TORCH_CHECK(cu_q.dim() == 1 && cu_k.dim() == 1 && !q.empty() && q.size() == k.size(),
                  "cu_seqlens_q and cu_seqlens_k must be 1-D with one element more than there are "
                  "sequences; got ",
                  text_of(cu_q), " and ", text_of(cu_k), ".");
  STD_TORCH_CHECK(q.front() == 0 && k.front() == 0, "cu_seqlens must start at 0; they start at ",
                  q.front(), " (q) and ", k.front(), " (k). Subtract that, and slice q, k and v.");
  STD_TORCH_CHECK(left >= -1 && right >= -1,
                  "window_size must be (left, right), each -1 (no limit) or more; got (", left,
                  ", ", right, ").");
  std::vector<int64_t> rows;
  for (size_t b = 0; b + 1 < q.size(); ++b) {
    const int64_t lq = q[b + 1] - q[b], lk = k[b + 1] - k[b];
    STD_TORCH_CHECK(lq >= 0 && lk >= 0, "cu_seqlens must not decrease; sequence ", b,
                    " has lengths ", lq, " (q) and ", lk, " (k).");
    int64_t ahead = right < 0 ? lq + lk : right;
    if (causal) ahead = 0;
    ahead = std::min(ahead, lq + lk);
    const int64_t window = left < 0 ? -1 : std::min(left, lq + lk) + ahead;
    rows.insert(rows.end(), {q[b], lq, k[b], lk, lk - lq + ahead, window});
  }
  return check_segments(rows, s);
}

// Multiply-adds of the forward, before masks.
int64_t work(const Shape& s, const SegmentList& list) {
  int64_t pairs = s.total_q;
  for (const Segment& g : list.segments) pairs += g.q_len * g.k_len;
  return 2 * pairs * s.heads * s.dim;
}

void run_forward(const ForwardArgs& args, const SegmentList& list) {
  attention_forward(args, list, pool(work(args.shape, list)));
}

void run_backward(BackwardArgs& args, const SegmentList& list) {
  Tensor delta = empty_cpu({args.shape.heads, args.shape.total_q}, accumulation_type(args.q.dtype));
  args.delta = {delta.data_ptr(), args.shape.total_q, 1};
  attention_backward(args, list, pool(2 * work(args.shape, list)));
}

void segment_forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& segments,
                     Tensor out, Tensor lse, MaybeTensor sample_ids, MaybeTensor q_positions,
                     MaybeTensor k_positions, double scale, double softcap, bool merge,
                     double dropout_p, int64_t rng_key, int64_t head_offset) {
  const Inputs in = check_inputs(q, k, v);
  ForwardArgs args{in.shape,
                   check_options(in.shape, scale, softcap, dropout_p, rng_key, sample_ids,
                                 q_positions, k_positions, head_offset),
                   in.q,
                   in.k,
                   in.v,
                   check_like(out, in.shape, true, in.dtype, merge, "out"),
                   stat_of(lse, in.dtype, in.shape.heads, in.shape.total_q, "lse"),
                   merge};
  run_forward(args, check_segments(segments, in.shape));
}

BackwardArgs backward_args(const Inputs& in, const Options& options, const Tensor& dout,
                           const Tensor& out, const Tensor& lse, const MaybeTensor& dlse) {
  BackwardArgs args;
  args.shape = in.shape;
  args.options = options;
  args.q = in.q;
  args.k = in.k;
  args.v = in.v;
  args.out = check_like(out, in.shape, true, in.dtype, false, "out");
  args.dout = check_like(dout, in.shape, true, in.dtype, false, "dout");
  args.lse = stat_of(lse, in.dtype, in.shape.heads, in.shape.total_q, "lse");
  if (dlse) {
    args.dlse = stat_of(*dlse, in.dtype, in.shape.heads, in.shape.total_q, "dlse");
  }
  return args;
}

void segment_backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                      const Tensor& out, const Tensor& lse, const Tensor& segments, Tensor dq,
                      Tensor dk, Tensor dv, MaybeTensor dlse, MaybeTensor sample_ids,
                      MaybeTensor q_positions, MaybeTensor k_positions, double scale,
                      double softcap, double dropout_p, int64_t rng_key, int64_t head_offset) {
  const Inputs in = check_inputs(q, k, v);
  BackwardArgs args =
      backward_args(in,
                    check_options(in.shape, scale, softcap, dropout_p, rng_key, sample_ids,
                                  q_positions, k_positions, head_offset),
                    dout, out, lse, dlse);
  args.dq = check_like(dq, in.shape, true, in.dtype, true, "dq");
  args.dk = check_like(dk, in.shape, false, in.dtype, true, "dk");
  args.dv = check_like(dv, in.shape, false, in.dtype, true, "dv");
  args.accumulate = true;
  run_backward(args, check_segments(segments, in.shape));
}

std::tuple<Tensor, Tensor> forward_new(const Tensor& q, const Inputs& in, const Options& options,
                                       const SegmentList& list) {
  Tensor out = empty_cpu({in.shape.total_q, in.shape.heads, in.shape.dim}, q.scalar_type());
  Tensor lse = empty_cpu({in.shape.heads, in.shape.total_q}, accumulation_type(in.dtype));
  ForwardArgs args{in.shape,
                   options,
                   in.q,
                   in.k,
                   in.v,
                   rows_of(out, "out"),
                   stat_of(lse, in.dtype, in.shape.heads, in.shape.total_q, "lse"),
                   false};
  run_forward(args, list);
  return {out, lse};
}

Three backward_new(const Tensor& q, BackwardArgs args, const SegmentList& list) {
  const Shape& s = args.shape;
  Tensor dq = empty_cpu({s.total_q, s.heads, s.dim}, q.scalar_type());
  Tensor dk = empty_cpu({s.total_k, s.kv_heads, s.dim}, q.scalar_type());
  Tensor dv = empty_cpu({s.total_k, s.kv_heads, s.dim}, q.scalar_type());
  args.dq = rows_of(dq, "dq");
  args.dk = rows_of(dk, "dk");
  args.dv = rows_of(dv, "dv");
  run_backward(args, list);
  return {dq, dk, dv};
}

double scale_or_default(std::optional<double> scale, const Shape& s) {
  return scale ? *scale : 1.0 / std::sqrt(static_cast<double>(s.dim));
}

std::tuple<Tensor, Tensor> segment_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                             const Tensor& segments, MaybeTensor sample_ids,
                                             MaybeTensor q_positions, MaybeTensor k_positions,
                                             std::optional<double> scale, double softcap,
                                             double dropout_p, int64_t rng_key,
                                             int64_t head_offset) {
  const Inputs in = check_inputs(q, k, v);
  return forward_new(q, in,
                     check_options(in.shape, scale_or_default(scale, in.shape), softcap, dropout_p,
                                   rng_key, sample_ids, q_positions, k_positions, head_offset),
                     check_segments(segments, in.shape));
}

Three segment_attention_grad(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                             const Tensor& out, const Tensor& lse, const Tensor& segments,
                             MaybeTensor dlse, MaybeTensor sample_ids, MaybeTensor q_positions,
                             MaybeTensor k_positions, std::optional<double> scale, double softcap,
                             double dropout_p, int64_t rng_key, int64_t head_offset) {
  const Inputs in = check_inputs(q, k, v);
  const Options options =
      check_options(in.shape, scale_or_default(scale, in.shape), softcap, dropout_p, rng_key,
                    sample_ids, q_positions, k_positions, head_offset);
  return backward_new(q, backward_args(in, options, dout, out, lse, dlse),
                      check_segments(segments, in.shape));
}

std::tuple<Tensor, Tensor> varlen_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                            const Tensor& cu_q, const Tensor& cu_k,
                                            MaybeTensor sample_ids, MaybeTensor q_positions,
                                            MaybeTensor k_positions, std::optional<double> scale,
                                            bool causal, int64_t left, int64_t right,
                                            double softcap, double dropout_p, int64_t rng_key,
                                            int64_t head_offset) {
  const Inputs in = check_inputs(q, k, v);
  return forward_new(q, in,
                     check_options(in.shape, scale_or_default(scale, in.shape), softcap, dropout_p,
                                   rng_key, sample_ids, q_positions, k_positions, head_offset),
                     varlen_segments(cu_q, cu_k, in.shape, causal, left, right));
}

Three varlen_attention_grad(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                            const Tensor& out, const Tensor& lse, const Tensor& cu_q,
                            const Tensor& cu_k, MaybeTensor dlse, MaybeTensor sample_ids,
                            MaybeTensor q_positions, MaybeTensor k_positions,
                            std::optional<double> scale, bool causal, int64_t left, int64_t right,
                            double softcap, double dropout_p, int64_t rng_key,
                            int64_t head_offset) {
  const Inputs in = check_inputs(q, k, v);
  const Options options =
      check_options(in.shape, scale_or_default(scale, in.shape), softcap, dropout_p, rng_key,
                    sample_ids, q_positions, k_positions, head_offset);
  return backward_new(q, backward_args(in, options, dout, out, lse, dlse),
                      varlen_segments(cu_q, cu_k, in.shape, causal, left, right));
}

}  // namespace
}  // namespace mdcp

#define MDCP_KEYS "Tensor? sample_ids=None, Tensor? q_positions=None, Tensor? k_positions=None, "
#define MDCP_DROPOUT "float dropout_p=0.0, int rng_key=0, int head_offset=0"
#define MDCP_BAND "bool causal=True, int window_left=-1, int window_right=-1, "

// Tensors come before the `*`: torch's autograd registration takes no keyword-only tensors.
STABLE_TORCH_LIBRARY_FRAGMENT(megatron_dcp, m) {
  m.def(
      "segment_attention_forward(Tensor q, Tensor k, Tensor v, Tensor segments, Tensor(a!) out, "
      "Tensor(b!) lse, " MDCP_KEYS
      "*, float softmax_scale, float softcap=0.0, "
      "bool merge=True, " MDCP_DROPOUT ") -> ()");
  m.def(
      "segment_attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, "
      "Tensor lse, Tensor segments, Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, "
      "Tensor? dlse=None, " MDCP_KEYS "*, float softmax_scale, float softcap=0.0, " MDCP_DROPOUT
      ") -> ()");
  m.def("segment_attention(Tensor q, Tensor k, Tensor v, Tensor segments, " MDCP_KEYS
        "*, "
        "float? softmax_scale=None, float softcap=0.0, " MDCP_DROPOUT
        ") -> (Tensor out, Tensor lse)");
  m.def(
      "segment_attention_grad(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
      "Tensor segments, Tensor? dlse=None, " MDCP_KEYS
      "*, float? softmax_scale=None, "
      "float softcap=0.0, " MDCP_DROPOUT ") -> (Tensor dq, Tensor dk, Tensor dv)");
  m.def(
      "varlen_attention(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, "
      "Tensor cu_seqlens_k, " MDCP_KEYS "*, float? softmax_scale=None, " MDCP_BAND
      "float softcap=0.0, " MDCP_DROPOUT ") -> (Tensor out, Tensor lse)");
  m.def(
      "varlen_attention_grad(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
      "Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? dlse=None, " MDCP_KEYS
      "*, "
      "float? softmax_scale=None, " MDCP_BAND "float softcap=0.0, " MDCP_DROPOUT
      ") -> (Tensor dq, Tensor dk, Tensor dv)");
}

STABLE_TORCH_LIBRARY_IMPL(megatron_dcp, CPU, m) {
  m.impl("segment_attention_forward", TORCH_BOX(&mdcp::segment_forward));
  m.impl("segment_attention_backward", TORCH_BOX(&mdcp::segment_backward));
  m.impl("segment_attention", TORCH_BOX(&mdcp::segment_attention));
  m.impl("segment_attention_grad", TORCH_BOX(&mdcp::segment_attention_grad));
  m.impl("varlen_attention", TORCH_BOX(&mdcp::varlen_attention));
  m.impl("varlen_attention_grad", TORCH_BOX(&mdcp::varlen_attention_grad));
}
