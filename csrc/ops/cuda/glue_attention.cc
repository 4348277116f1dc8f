// The attention ops for CUDA tensors. Contracts: megatron_dcp/ops/__init__.py.
//
// `segments` and `cu_seqlens` are read on the host: given as CPU tensors they cost nothing, given
// on the device each call waits for the stream.
#include <algorithm>
#include <cmath>
#include <mutex>
#include <tuple>

#include "glue.h"

namespace mdcp::cuda::glue {
namespace {

using Three = std::tuple<Tensor, Tensor, Tensor>;

constexpr int64_t kNoLimit = INT64_C(1) << 40;

struct Inputs {
  Tensor q, k, v;  // as the kernels read them: copies where alignment asked for one
  MdcpAttentionOptions options{};
  std::string shapes;
  std::vector<Tensor> kept;  // index tensors of dropout

  int64_t heads() const { return options.heads; }
};

struct Dropout {
  double p;
  int64_t key, head_offset;
  const MaybeTensor &sample_ids, &q_positions, &k_positions;
};

Inputs check_inputs(const Call& call, const Tensor& q, const Tensor& k, const Tensor& v,
                    std::optional<double> scale, double softcap, const Dropout& dropout) {
  for (const auto& [t, name] : {std::pair(&q, "q"), std::pair(&k, "k"), std::pair(&v, "v")})
    rows_of(call, *t, name);
  const int dtype = dtype_of(q, "q");
  STD_TORCH_CHECK(k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type(),
                  "q, k and v must have one dtype.");
  const int64_t dim = q.size(2), heads = q.size(1), kv_heads = k.size(1);
  STD_TORCH_CHECK(
      v.size(0) == k.size(0) && v.size(1) == kv_heads && v.size(2) == dim && k.size(2) == dim,
      "k and v must have one shape and the dim of q (", dim, "); got ", shape_text(k), " and ",
      shape_text(v), ".");
  STD_TORCH_CHECK(kv_heads > 0 && heads > 0 && heads % kv_heads == 0,
                  "the query heads must be a multiple of the KV heads; got ", heads, " and ",
                  kv_heads, ".");
  STD_TORCH_CHECK(dim > 0 && dim <= 256, "head dim must be 1 to 256; got ", dim, ".");
  STD_TORCH_CHECK(softcap >= 0, "softcap must be 0 (off) or positive; got ", softcap, ".");
  STD_TORCH_CHECK(dropout.p >= 0 && dropout.p < 1, "dropout_p must be in [0, 1); got ", dropout.p,
                  ".");
  Inputs in{q, k, v, {}, shape_text(q) + " x " + shape_text(k), {}};
  MdcpAttentionOptions& o = in.options;
  o.scale = scale ? *scale : 1.0 / std::sqrt(static_cast<double>(dim));
  o.softcap = softcap;
  o.total_q = q.size(0);
  o.total_k = k.size(0);
  o.heads = static_cast<int32_t>(heads);
  o.kv_heads = static_cast<int32_t>(kv_heads);
  o.head_dim = static_cast<int32_t>(dim);
  o.dtype = dtype;
  // The kernels for tensor cores take 16-bit types, whole 16-byte chunks and a positive scale.
  o.scalar =
      dtype == MDCP_F64 || dtype == MDCP_F32 || dim % 8 != 0 || !(o.scale > 0) || dropout.p > 0;
  if (!o.scalar) {
    in.q = loadable(call, q, q.scalar_type());
    in.k = loadable(call, k, q.scalar_type());
    in.v = loadable(call, v, q.scalar_type());
  }
  if (dropout.p > 0) {
    STD_TORCH_CHECK(dropout.sample_ids && dropout.q_positions && dropout.k_positions,
                    "dropout needs sample_ids, q_positions and k_positions: masks belong to the "
                    "sample, not to the rank. Pass the three int64 tensors.");
    in.kept = {call.indices(*dropout.sample_ids, o.total_q, "sample_ids"),
               call.indices(*dropout.q_positions, o.total_q, "q_positions"),
               call.indices(*dropout.k_positions, o.total_k, "k_positions")};
    const auto data = [&](size_t i) { return static_cast<const int64_t*>(in.kept[i].data_ptr()); };
    o.dropout = {
        dropout.p, static_cast<uint64_t>(dropout.key), dropout.head_offset, data(0), data(1),
        data(2)};
  }
  return in;
}

// The band of the ecosystem's (causal, window_size) convention, aligned to the bottom right.
std::vector<int64_t> varlen_segments(const Call& call, const Tensor& cu_q, const Tensor& cu_k,
                                     bool causal, int64_t left, int64_t right) {
  const std::vector<int64_t> q = call.integers(cu_q, "cu_seqlens_q");
  const std::vector<int64_t> k = call.integers(cu_k, "cu_seqlens_k");
  STD_TORCH_CHECK(cu_q.dim() == 1 && cu_k.dim() == 1 && !q.empty() && q.size() == k.size(),
                  "cu_seqlens_q and cu_seqlens_k must be 1-D with one element more than there are "
                  "sequences; got ",
                  q.size(), " and ", k.size(), " elements.");
  STD_TORCH_CHECK(q.front() == 0 && k.front() == 0, "cu_seqlens must start at 0.");
  STD_TORCH_CHECK(left >= -1 && right >= -1, "window_size must be (left, right), each -1 or more.");
  std::vector<int64_t> rows;
  for (size_t b = 0; b + 1 < q.size(); ++b) {
    const int64_t lq = q[b + 1] - q[b], lk = k[b + 1] - k[b];
    STD_TORCH_CHECK(lq >= 0 && lk >= 0, "cu_seqlens must not decrease; sequence ", b,
                    " has lengths ", lq, " (q) and ", lk, " (k).");
    const int64_t ahead = causal ? 0 : std::min(right < 0 ? kNoLimit : right, lq + lk);
    const int64_t window = left < 0 ? -1 : std::min(left, lq + lk) + ahead;
    rows.insert(rows.end(), {q[b], lq, k[b], lk, lk - lq + ahead, window});
  }
  return rows;
}

std::vector<int64_t> list_segments(const Call& call, const Tensor& segments) {
  STD_TORCH_CHECK(segments.dim() == 2 && segments.size(1) == 6,
                  "segments must be [count, 6]: q_start, q_len, k_start, k_len, diagonal, window; "
                  "got ",
                  shape_text(segments), ".");
  return call.integers(segments, "segments");
}

void check_bounds(const std::vector<int64_t>& rows, const MdcpAttentionOptions& o) {
  for (size_t i = 0; i < rows.size(); i += 6) {
    const int64_t* r = rows.data() + i;
    STD_TORCH_CHECK(r[0] >= 0 && r[1] >= 0 && r[1] <= o.total_q && r[0] <= o.total_q - r[1] &&
                        r[2] >= 0 && r[3] >= 0 && r[3] <= o.total_k && r[2] <= o.total_k - r[3],
                    "segment ", i / 6, " (q_start ", r[0], ", q_len ", r[1], ", k_start ", r[2],
                    ", k_len ", r[3], ") leaves q of ", o.total_q, " rows or k of ", o.total_k,
                    " rows.");
  }
}

struct PlanOnDevice {
  MdcpAttentionPlan plan{};
  Tensor blob;
};

// Plans of the last calls: the layers of a model ask for the same one many times. A plan is bound
// to the stream that copied it, since its counter is reset in stream order.
struct CachedPlan {
  std::vector<int64_t> key;
  PlanOnDevice value;
};

// A launch resets the counter of its plan and then runs: two host threads must not interleave
// these.
std::mutex& launch_mutex() {
  static std::mutex mutex;
  return mutex;
}

PlanOnDevice plan_for(const Call& call, const Inputs& in, const std::vector<int64_t>& segments,
                      int pass) {
  constexpr size_t kKept = 32;
  static std::mutex mutex;
  static auto* const cache = new std::vector<CachedPlan>;  // outlives torch's own teardown
  const MdcpAttentionOptions& o = in.options;
  std::vector<int64_t> key = segments;
  key.insert(key.end(),
             {o.total_q, o.total_k, pass, o.dtype, o.head_dim, o.scalar, in.q.get_device_index(),
              static_cast<int64_t>(reinterpret_cast<uintptr_t>(call.stream()))});
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = std::find_if(cache->begin(), cache->end(),
                                  [&](const CachedPlan& entry) { return entry.key == key; });
  if (found != cache->end()) {
    std::rotate(cache->begin(), found, found + 1);  // most recent first
    return cache->front().value;
  }
  MdcpAttentionPlan plan;
  const int64_t count = static_cast<int64_t>(segments.size() / 6);
  std::vector<char> host;
  for (int round = 0; round < 2; ++round) {  // first for the size
    call.check(mdcp_cuda_attention_plan(segments.data(), count, o.total_q, o.total_k, pass, o.dtype,
                                        o.head_dim, o.scalar, &plan, host.data(),
                                        static_cast<int64_t>(host.size())),
               in.shapes);
    host.resize(static_cast<size_t>(plan.bytes));
  }
  Tensor blob = call.empty({plan.bytes}, ScalarType::Byte);
  call.check(mdcp_cuda_to_device(blob.data_ptr(), host.data(), plan.bytes, call.stream()),
             in.shapes);
  if (cache->size() >= kKept) cache->pop_back();
  cache->insert(cache->begin(), CachedPlan{std::move(key), {plan, blob}});
  return {plan, blob};
}

// out, dq, dk, dv: the accumulation type, or, unless `accumulator_only`, the dtype of the inputs.
MdcpRows check_result(const Call& call, const Inputs& in, const Tensor& t, bool query,
                      bool accumulator_only, const char* name) {
  const MdcpAttentionOptions& o = in.options;
  const MdcpRows rows = rows_of(call, t, name);
  const int64_t total = query ? o.total_q : o.total_k, heads = query ? o.heads : o.kv_heads;
  STD_TORCH_CHECK(t.size(0) == total && t.size(1) == heads && t.size(2) == o.head_dim, name,
                  " must be [", total, ", ", heads, ", ", o.head_dim, "]; got ", shape_text(t),
                  ".");
  STD_TORCH_CHECK(
      t.scalar_type() == accumulation_type(o.dtype) || (!accumulator_only && rows.dtype == o.dtype),
      name,
      accumulator_only ? " must be float32 (float64 for float64 inputs)."
                       : " must have the dtype of q or its accumulation type.");
  return rows;
}

MdcpStat check_stat(const Call& call, const Inputs& in, const Tensor& t, const char* name) {
  const MdcpStat stat =
      stat_of(call, t, in.options.dtype, in.options.heads, in.options.total_q, name);
  STD_TORCH_CHECK(stat.row_stride == 1 || t.size(1) <= 1, name,
                  " must have unit stride along the tokens.");
  return stat;
}

void run_forward(const Call& call, const Inputs& in, const std::vector<int64_t>& segments,
                 const Tensor& out, const Tensor& lse, bool merge) {
  check_bounds(segments, in.options);
  const PlanOnDevice plan = plan_for(call, in, segments, MDCP_FORWARD);
  const MdcpStat stat = check_stat(call, in, lse, "lse");
  const MdcpAttentionForward args{in.options,
                                  rows_of(call, in.q, "q"),
                                  rows_of(call, in.k, "k"),
                                  rows_of(call, in.v, "v"),
                                  check_result(call, in, out, true, merge, "out"),
                                  stat.data,
                                  stat.head_stride,
                                  plan.plan,
                                  plan.blob.data_ptr(),
                                  merge};
  const std::lock_guard<std::mutex> lock(launch_mutex());
  call.check(mdcp_cuda_attention_forward(&args, call.stream()), in.shapes);
}

struct Results {
  const Tensor &dout, &out, &lse;
  const MaybeTensor& dlse;
};

void run_backward(const Call& call, const Inputs& in, const std::vector<int64_t>& segments,
                  const Results& r, const Tensor& dq, const Tensor& dk, const Tensor& dv,
                  bool accumulate) {
  check_bounds(segments, in.options);
  const MdcpAttentionOptions& o = in.options;
  check_result(call, in, r.out, true, false, "out");
  check_result(call, in, r.dout, true, false, "dout");
  const MdcpStat lse = check_stat(call, in, r.lse, "lse");
  const Tensor dout = loadable(call, r.dout, scalar_type_of(o.dtype));
  const Tensor delta = call.empty({o.heads, o.total_q}, accumulation_type(o.dtype));
  MdcpAttentionDelta first{rows_of(call, r.out, "out"),
                           rows_of(call, dout, "dout"),
                           nullptr,
                           delta.data_ptr(),
                           0,
                           o.total_q,
                           o.total_q,
                           o.heads,
                           o.head_dim};
  Tensor dlse_copy = r.lse;  // of an expanded or transposed dlse
  if (r.dlse) {
    MdcpStat dlse = stat_of(call, *r.dlse, o.dtype, o.heads, o.total_q, "dlse");
    if (dlse.row_stride != 1) {
      dlse_copy = call.empty({o.heads, o.total_q}, accumulation_type(o.dtype));
      torch::stable::copy_(dlse_copy, *r.dlse);
      dlse = check_stat(call, in, dlse_copy, "dlse");
    }
    first.dlse = dlse.data;
    first.dlse_head_stride = dlse.head_stride;
  }
  call.check(mdcp_cuda_attention_delta(&first, call.stream()), in.shapes);
  const PlanOnDevice q_plan = plan_for(call, in, segments, MDCP_BACKWARD_Q);
  const PlanOnDevice kv_plan = plan_for(call, in, segments, MDCP_BACKWARD_KV);
  const MdcpAttentionBackward args{o,
                                   rows_of(call, in.q, "q"),
                                   rows_of(call, in.k, "k"),
                                   rows_of(call, in.v, "v"),
                                   rows_of(call, dout, "dout"),
                                   check_result(call, in, dq, true, accumulate, "dq"),
                                   check_result(call, in, dk, false, accumulate, "dk"),
                                   check_result(call, in, dv, false, accumulate, "dv"),
                                   lse.data,
                                   delta.data_ptr(),
                                   lse.head_stride,
                                   o.total_q,
                                   q_plan.plan,
                                   kv_plan.plan,
                                   q_plan.blob.data_ptr(),
                                   kv_plan.blob.data_ptr(),
                                   accumulate};
  const std::lock_guard<std::mutex> lock(launch_mutex());
  call.check(mdcp_cuda_attention_backward(&args, call.stream()), in.shapes);
}

std::tuple<Tensor, Tensor> forward_new(const Call& call, const Inputs& in,
                                       const std::vector<int64_t>& segments) {
  const MdcpAttentionOptions& o = in.options;
  Tensor out = call.empty({o.total_q, o.heads, o.head_dim}, scalar_type_of(o.dtype));
  Tensor lse = call.empty({o.heads, o.total_q}, accumulation_type(o.dtype));
  run_forward(call, in, segments, out, lse, false);
  return {out, lse};
}

Three backward_new(const Call& call, const Inputs& in, const std::vector<int64_t>& segments,
                   const Results& results) {
  const MdcpAttentionOptions& o = in.options;
  const ScalarType type = scalar_type_of(o.dtype);
  Tensor dq = call.empty({o.total_q, o.heads, o.head_dim}, type);
  Tensor dk = call.empty({o.total_k, o.kv_heads, o.head_dim}, type);
  Tensor dv = call.empty({o.total_k, o.kv_heads, o.head_dim}, type);
  run_backward(call, in, segments, results, dq, dk, dv, false);
  return {dq, dk, dv};
}

void segment_forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& segments,
                     Tensor out, Tensor lse, MaybeTensor sample_ids, MaybeTensor q_positions,
                     MaybeTensor k_positions, double scale, double softcap, bool merge,
                     double dropout_p, int64_t rng_key, int64_t head_offset) {
  const Call call("segment_attention_forward", q);
  const Inputs in =
      check_inputs(call, q, k, v, scale, softcap,
                   {dropout_p, rng_key, head_offset, sample_ids, q_positions, k_positions});
  run_forward(call, in, list_segments(call, segments), out, lse, merge);
}

void segment_backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                      const Tensor& out, const Tensor& lse, const Tensor& segments, Tensor dq,
                      Tensor dk, Tensor dv, MaybeTensor dlse, MaybeTensor sample_ids,
                      MaybeTensor q_positions, MaybeTensor k_positions, double scale,
                      double softcap, double dropout_p, int64_t rng_key, int64_t head_offset) {
  const Call call("segment_attention_backward", q);
  const Inputs in =
      check_inputs(call, q, k, v, scale, softcap,
                   {dropout_p, rng_key, head_offset, sample_ids, q_positions, k_positions});
  run_backward(call, in, list_segments(call, segments), {dout, out, lse, dlse}, dq, dk, dv, true);
}

std::tuple<Tensor, Tensor> segment_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                             const Tensor& segments, MaybeTensor sample_ids,
                                             MaybeTensor q_positions, MaybeTensor k_positions,
                                             std::optional<double> scale, double softcap,
                                             double dropout_p, int64_t rng_key,
                                             int64_t head_offset) {
  const Call call("segment_attention", q);
  const Inputs in =
      check_inputs(call, q, k, v, scale, softcap,
                   {dropout_p, rng_key, head_offset, sample_ids, q_positions, k_positions});
  return forward_new(call, in, list_segments(call, segments));
}

Three segment_attention_grad(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                             const Tensor& out, const Tensor& lse, const Tensor& segments,
                             MaybeTensor dlse, MaybeTensor sample_ids, MaybeTensor q_positions,
                             MaybeTensor k_positions, std::optional<double> scale, double softcap,
                             double dropout_p, int64_t rng_key, int64_t head_offset) {
  const Call call("segment_attention_grad", q);
  const Inputs in =
      check_inputs(call, q, k, v, scale, softcap,
                   {dropout_p, rng_key, head_offset, sample_ids, q_positions, k_positions});
  return backward_new(call, in, list_segments(call, segments), {dout, out, lse, dlse});
}

std::tuple<Tensor, Tensor> varlen_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                            const Tensor& cu_q, const Tensor& cu_k,
                                            MaybeTensor sample_ids, MaybeTensor q_positions,
                                            MaybeTensor k_positions, std::optional<double> scale,
                                            bool causal, int64_t left, int64_t right,
                                            double softcap, double dropout_p, int64_t rng_key,
                                            int64_t head_offset) {
  const Call call("varlen_attention", q);
  const Inputs in =
      check_inputs(call, q, k, v, scale, softcap,
                   {dropout_p, rng_key, head_offset, sample_ids, q_positions, k_positions});
  return forward_new(call, in, varlen_segments(call, cu_q, cu_k, causal, left, right));
}

Three varlen_attention_grad(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                            const Tensor& out, const Tensor& lse, const Tensor& cu_q,
                            const Tensor& cu_k, MaybeTensor dlse, MaybeTensor sample_ids,
                            MaybeTensor q_positions, MaybeTensor k_positions,
                            std::optional<double> scale, bool causal, int64_t left, int64_t right,
                            double softcap, double dropout_p, int64_t rng_key,
                            int64_t head_offset) {
  const Call call("varlen_attention_grad", q);
  const Inputs in =
      check_inputs(call, q, k, v, scale, softcap,
                   {dropout_p, rng_key, head_offset, sample_ids, q_positions, k_positions});
  return backward_new(call, in, varlen_segments(call, cu_q, cu_k, causal, left, right),
                      {dout, out, lse, dlse});
}

}  // namespace
}  // namespace mdcp::cuda::glue

MDCP_CUDA_LIBRARY(m) {
  using namespace mdcp::cuda::glue;
  m.impl("segment_attention_forward", TORCH_BOX(&segment_forward));
  m.impl("segment_attention_backward", TORCH_BOX(&segment_backward));
  m.impl("segment_attention", TORCH_BOX(&segment_attention));
  m.impl("segment_attention_grad", TORCH_BOX(&segment_attention_grad));
  m.impl("varlen_attention", TORCH_BOX(&varlen_attention));
  m.impl("varlen_attention_grad", TORCH_BOX(&varlen_attention_grad));
}
