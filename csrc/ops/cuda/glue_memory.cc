// The memory-bound ops for CUDA tensors. Contracts: megatron_dcp/ops/relayout.py and rows.py.
//
// Contents of device tensors (indices, labels, cu_seqlens) are checked by the kernels, which trap.
#include <algorithm>
#include <tuple>

#include "glue.h"

namespace mdcp::cuda::glue {
namespace {

using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;

const int64_t* integers_at(const Tensor& t) { return static_cast<const int64_t*>(t.data_ptr()); }

// The values of a dense tensor where the kernels can read them.
Tensor on_device(const Call& call, const Tensor& t, ScalarType type, const char* name) {
  STD_TORCH_CHECK(t.scalar_type() == type && t.is_contiguous(), name,
                  " must be contiguous, with the dtype that the op documents.");
  std::vector<int64_t> shape(t.sizes().begin(), t.sizes().end());
  Tensor copy = call.empty(shape, type);
  torch::stable::copy_(copy, t);
  return copy;
}

Three zigzag_partition(const Tensor& cu_seqlens, int64_t degree, int64_t total) {
  const Call call("zigzag_partition", cu_seqlens);
  STD_TORCH_CHECK(cu_seqlens.dim() == 1 && cu_seqlens.numel() > 0,
                  "cu_seqlens must be 1-D and start at 0.");
  STD_TORCH_CHECK(degree > 0, "degree must be 1 or more; got ", degree, ".");
  const Tensor cu = call.indices(cu_seqlens, cu_seqlens.numel(), "cu_seqlens");
  const int64_t samples = cu.numel() - 1;
  Tensor index = call.empty({total}, ScalarType::Long);
  Tensor positions = call.empty({total}, ScalarType::Long);
  Tensor cu_rank = call.empty({degree, samples + 1}, ScalarType::Long);
  call.check(mdcp_cuda_zigzag(integers_at(cu), samples, degree, total,
                              static_cast<int64_t*>(index.data_ptr()),
                              static_cast<int64_t*>(positions.data_ptr()),
                              static_cast<int64_t*>(cu_rank.data_ptr()), call.stream()),
             shape_text(cu_seqlens));
  return {index, positions, cu_rank};
}

std::vector<int64_t> shape_with_rows(const Tensor& x, int64_t rows) {
  STD_TORCH_CHECK(x.dim() > 0 && x.is_contiguous(), "x must be contiguous, with rows in dim 0.");
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape[0] = rows;
  return shape;
}

int64_t row_width(const Tensor& x) {
  int64_t width = 1;
  for (int64_t d = 1; d < x.dim(); ++d) width *= x.size(d);
  return width;
}

Tensor gather_rows(const Tensor& x, const Tensor& index) {
  const Call call("gather_rows", x);
  const Tensor places = call.indices(index, index.numel(), "index");
  Tensor out = torch::stable::new_empty(x, shape_with_rows(x, index.numel()));
  call.check(mdcp_cuda_gather_rows(
                 out.data_ptr(), x.data_ptr(), integers_at(places), places.numel(), x.size(0),
                 row_width(x) * static_cast<int64_t>(x.element_size()), call.stream()),
             shape_text(x));
  return out;
}

Tensor scatter_rows(const Tensor& x, const Tensor& index, int64_t rows) {
  const Call call("scatter_rows", x);
  const Tensor places = call.indices(index, index.numel(), "index");
  STD_TORCH_CHECK(x.dim() > 0 && x.size(0) == index.numel(), "x must have one row per index.");
  Tensor out = torch::stable::new_zeros(x, shape_with_rows(x, rows));
  Tensor scratch = call.empty({2 * rows}, ScalarType::Int);
  call.check(mdcp_cuda_scatter_rows(out.data_ptr(), x.data_ptr(), integers_at(places),
                                    places.numel(), rows, row_width(x), dtype_of(x, "x"),
                                    static_cast<int32_t*>(scratch.data_ptr()), call.stream()),
             shape_text(x));
  return out;
}

// Heads of one rank: its query heads, then its key and its value heads.
int64_t rank_width(int64_t heads, int64_t kv_heads, int64_t degree) {
  STD_TORCH_CHECK(degree > 0 && heads % degree == 0,
                  "Ulysses needs a degree that divides the query heads; got degree ", degree,
                  " and ", heads, " heads.");
  STD_TORCH_CHECK(kv_heads == 0 || kv_heads % degree == 0 || degree % kv_heads == 0,
                  "Ulysses needs a degree that divides the KV heads or is a multiple of them; got "
                  "degree ",
                  degree, " and ", kv_heads, " KV heads.");
  const int64_t kv = kv_heads == 0 ? 0 : std::max<int64_t>(1, kv_heads / degree);
  return heads / degree + 2 * kv;
}

Tensor ulysses_pack(const Tensor& q, const Tensor& k, const Tensor& v, int64_t degree) {
  const Call call("ulysses_pack", q);
  MdcpHeads args{rows_of(call, q, "q"),
                 rows_of(call, k, "k"),
                 rows_of(call, v, "v"),
                 nullptr,
                 q.size(0),
                 degree,
                 q.size(1),
                 k.size(1),
                 q.size(2)};
  STD_TORCH_CHECK(args.q.dtype == args.k.dtype && args.q.dtype == args.v.dtype,
                  "q, k and v must have one dtype.");
  STD_TORCH_CHECK(k.size(0) == q.size(0) && v.size(0) == q.size(0) && k.size(2) == q.size(2) &&
                      v.size(2) == q.size(2) && k.size(1) == v.size(1) && k.size(1) > 0,
                  "q, k and v must hold the same tokens and head dim, k and v the same heads.");
  Tensor buffer = call.empty(
      {degree, q.size(0), rank_width(q.size(1), k.size(1), degree), q.size(2)}, q.scalar_type());
  args.buffer = buffer.data_ptr();
  call.check(mdcp_cuda_ulysses_pack(&args, call.stream()), shape_text(q) + shape_text(k));
  return buffer;
}

Three ulysses_unpack(const Tensor& buffer, int64_t heads, int64_t kv_heads) {
  const Call call("ulysses_unpack", buffer);
  STD_TORCH_CHECK(buffer.dim() == 4 && buffer.is_contiguous(),
                  "buffer must be a contiguous [degree, tokens, heads, dim] tensor.");
  const int64_t degree = buffer.size(0), tokens = buffer.size(1), dim = buffer.size(3);
  STD_TORCH_CHECK(kv_heads > 0 && buffer.size(2) == rank_width(heads, kv_heads, degree),
                  "buffer must hold ", rank_width(heads, kv_heads, degree), " heads a rank; got ",
                  buffer.size(2), ".");
  Tensor q = call.empty({tokens, heads, dim}, buffer.scalar_type());
  Tensor k = call.empty({tokens, kv_heads, dim}, buffer.scalar_type());
  Tensor v = call.empty({tokens, kv_heads, dim}, buffer.scalar_type());
  const MdcpHeads args{rows_of(call, q, "q"),
                       rows_of(call, k, "k"),
                       rows_of(call, v, "v"),
                       buffer.data_ptr(),
                       tokens,
                       degree,
                       heads,
                       kv_heads,
                       dim};
  call.check(mdcp_cuda_ulysses_unpack(&args, call.stream()), shape_text(buffer));
  return {q, k, v};
}

Tensor ulysses_join(const Tensor& x) {
  const Call call("ulysses_join", x);
  STD_TORCH_CHECK(x.dim() == 4 && x.is_contiguous(),
                  "x must be a contiguous [degree, tokens, heads, dim] tensor.");
  const int64_t degree = x.size(0), heads = x.size(2) * degree;
  Tensor out = call.empty({x.size(1), heads, x.size(3)}, x.scalar_type());
  const MdcpRows rows = rows_of(call, out, "out");
  const MdcpHeads args{rows, rows, rows, x.data_ptr(), x.size(1), degree, heads, 0, x.size(3)};
  call.check(mdcp_cuda_ulysses_unpack(&args, call.stream()), shape_text(x));
  return out;
}

Tensor ulysses_split(const Tensor& x, int64_t degree) {
  const Call call("ulysses_split", x);
  const MdcpRows rows = rows_of(call, x, "x");
  STD_TORCH_CHECK(degree > 0 && x.size(1) % degree == 0, "degree ", degree,
                  " must divide the heads; got ", x.size(1), ".");
  Tensor out = call.empty({degree, x.size(0), x.size(1) / degree, x.size(2)}, x.scalar_type());
  const MdcpHeads args{rows,   rows,      rows, out.data_ptr(), x.size(0),
                       degree, x.size(1), 0,    x.size(2)};
  call.check(mdcp_cuda_ulysses_pack(&args, call.stream()), shape_text(x));
  return out;
}

void zero_padding(Tensor x, const Tensor& cu_seqlens) {
  const Call call("zero_padding_", x);
  STD_TORCH_CHECK(x.dim() > 0 && x.is_contiguous(), "x must be contiguous, with rows in dim 0.");
  STD_TORCH_CHECK(cu_seqlens.dim() == 1 && cu_seqlens.numel() > 0, "cu_seqlens must be 1-D.");
  const Tensor cu = call.indices(cu_seqlens, cu_seqlens.numel(), "cu_seqlens");
  call.check(mdcp_cuda_zero_padding(x.data_ptr(), x.size(0),
                                    row_width(x) * static_cast<int64_t>(x.element_size()),
                                    integers_at(cu), cu.numel() - 1, call.stream()),
             shape_text(x));
}

MdcpMerge merge_args(const Call& call, const Tensor& out_a, const Tensor& lse_a,
                     const Tensor& out_b, const Tensor& lse_b) {
  MdcpMerge args{};
  args.out_a = rows_of(call, out_a, "out_a");
  args.out_b = rows_of(call, out_b, "out_b");
  args.rows = out_a.size(0);
  args.heads = out_a.size(1);
  args.dim = out_a.size(2);
  STD_TORCH_CHECK(args.out_a.dtype == args.out_b.dtype && out_b.size(0) == args.rows &&
                      out_b.size(1) == args.heads && out_b.size(2) == args.dim,
                  "out_a and out_b must have one shape and dtype.");
  const int dtype = static_cast<int>(args.out_a.dtype);
  args.lse_a = stat_of(call, lse_a, dtype, args.heads, args.rows, "lse_a");
  args.lse_b = stat_of(call, lse_b, dtype, args.heads, args.rows, "lse_b");
  return args;
}

Tensor like(const Call& call, const Tensor& x) {
  return call.empty(std::vector<int64_t>(x.sizes().begin(), x.sizes().end()), x.scalar_type());
}

MdcpStat stat_view(const Tensor& t) { return {t.data_ptr(), t.stride(0), t.stride(1)}; }

Two merge_lse(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b, const Tensor& lse_b) {
  const Call call("merge_lse", out_a);
  MdcpMerge args = merge_args(call, out_a, lse_a, out_b, lse_b);
  Tensor out = like(call, out_a), lse = like(call, lse_a);
  args.out = rows_of(call, out, "out");
  args.lse = stat_view(lse);
  call.check(mdcp_cuda_merge_lse(&args, call.stream()), shape_text(out_a));
  return {out, lse};
}

Four merge_lse_grad(const Tensor& dout, const Tensor& out_a, const Tensor& lse_a,
                    const Tensor& out_b, const Tensor& lse_b, MaybeTensor dlse) {
  const Call call("merge_lse_grad", out_a);
  MdcpMergeGrad args{};
  args.forward = merge_args(call, out_a, lse_a, out_b, lse_b);
  args.dout = rows_of(call, dout, "dout");
  const MdcpMerge& m = args.forward;
  STD_TORCH_CHECK(args.dout.dtype == m.out_a.dtype && dout.size(0) == m.rows &&
                      dout.size(1) == m.heads && dout.size(2) == m.dim,
                  "dout must have the shape and dtype of out_a.");
  if (dlse)
    args.dlse = stat_of(call, *dlse, static_cast<int>(m.out_a.dtype), m.heads, m.rows, "dlse");
  Tensor da = like(call, out_a), db = like(call, out_b);
  Tensor la = like(call, lse_a), lb = like(call, lse_b);
  args.dout_a = rows_of(call, da, "dout_a");
  args.dout_b = rows_of(call, db, "dout_b");
  args.dlse_a = stat_view(la);
  args.dlse_b = stat_view(lb);
  call.check(mdcp_cuda_merge_lse_grad(&args, call.stream()), shape_text(out_a));
  return {da, la, db, lb};
}

Tensor rope(const Tensor& x, const Tensor& positions, const Tensor& frequencies, double scale,
            bool interleaved, bool inverse) {
  const Call call("rope", x);
  const MdcpRows rows = rows_of(call, x, "x");
  const Tensor where = call.indices(positions, x.size(0), "positions");
  STD_TORCH_CHECK(frequencies.dim() == 1 && 2 * frequencies.numel() <= x.size(2),
                  "frequencies must hold at most dim / 2 = ", x.size(2) / 2, " elements; got ",
                  shape_text(frequencies), ".");
  const Tensor turns = on_device(call, frequencies, ScalarType::Double, "frequencies");
  Tensor out = like(call, x);
  const MdcpRope args{rows,
                      rows_of(call, out, "out"),
                      integers_at(where),
                      static_cast<const double*>(turns.data_ptr()),
                      scale,
                      x.size(0),
                      x.size(1),
                      x.size(2),
                      turns.numel(),
                      interleaved,
                      inverse};
  call.check(mdcp_cuda_rope(&args, call.stream()), shape_text(x));
  return out;
}

MdcpCrossEntropy cross_entropy_args(const Call& call, const Tensor& logits, const Tensor& labels,
                                    const MaybeTensor& weights) {
  STD_TORCH_CHECK(logits.dim() == 2, "logits must be a [tokens, vocab] tensor; got ",
                  shape_text(logits), ".");
  STD_TORCH_CHECK(logits.size(1) > 0 && (logits.stride(1) == 1 || logits.numel() == 0),
                  "logits must have a vocabulary, with unit stride.");
  MdcpCrossEntropy args{};
  args.logits = logits.data_ptr();
  args.labels = integers_at(labels);
  args.tokens = logits.size(0);
  args.vocab = logits.size(1);
  args.row_stride = logits.stride(0);
  args.dtype = dtype_of(logits, "logits");
  if (weights) {
    call.check_device(*weights, "weights");
    STD_TORCH_CHECK(weights->dim() == 1 && weights->size(0) == args.tokens &&
                        weights->is_contiguous() &&
                        weights->scalar_type() == accumulation_type(static_cast<int>(args.dtype)),
                    "weights must be [tokens], contiguous, float32 (float64 for float64 logits).");
    args.weights = weights->data_ptr();
  }
  return args;
}

Two cross_entropy(const Tensor& logits, const Tensor& labels, MaybeTensor weights) {
  const Call call("cross_entropy", logits);
  const Tensor targets = call.indices(labels, logits.size(0), "labels");
  MdcpCrossEntropy args = cross_entropy_args(call, logits, targets, weights);
  const ScalarType type = accumulation_type(static_cast<int>(args.dtype));
  Tensor loss = call.empty({}, type), lse = call.empty({args.tokens}, type);
  Tensor losses = call.empty({args.tokens}, ScalarType::Double);
  args.loss = loss.data_ptr();
  args.lse = lse.data_ptr();
  args.losses = static_cast<double*>(losses.data_ptr());
  call.check(mdcp_cuda_cross_entropy(&args, call.stream()), shape_text(logits));
  return {loss, lse};
}

Tensor cross_entropy_grad(const Tensor& dloss, const Tensor& logits, const Tensor& labels,
                          const Tensor& lse, MaybeTensor weights, MaybeTensor dlse) {
  const Call call("cross_entropy_grad", logits);
  const Tensor targets = call.indices(labels, logits.size(0), "labels");
  MdcpCrossEntropyGrad args{};
  args.forward = cross_entropy_args(call, logits, targets, weights);
  const ScalarType type = accumulation_type(static_cast<int>(args.forward.dtype));
  call.check_device(dloss, "dloss");
  STD_TORCH_CHECK(dloss.numel() == 1 && dloss.scalar_type() == type, "dloss must be a scalar.");
  for (const auto& [t, name] : {std::pair(&lse, "lse"), std::pair(dlse ? &*dlse : &lse, "dlse")})
    STD_TORCH_CHECK(
        t->numel() == args.forward.tokens && t->is_contiguous() && t->scalar_type() == type, name,
        " must be [tokens], contiguous, with the dtype of lse.");
  args.forward.lse = lse.data_ptr();
  args.dloss = dloss.data_ptr();
  args.dlse = dlse ? dlse->data_ptr() : nullptr;
  Tensor dlogits = call.empty({logits.size(0), logits.size(1)}, logits.scalar_type());
  args.dlogits = dlogits.data_ptr();
  call.check(mdcp_cuda_cross_entropy_grad(&args, call.stream()), shape_text(logits));
  return dlogits;
}

}  // namespace
}  // namespace mdcp::cuda::glue

MDCP_CUDA_LIBRARY(m) {
  using namespace mdcp::cuda::glue;
  m.impl("zigzag_partition", TORCH_BOX(&zigzag_partition));
  m.impl("gather_rows", TORCH_BOX(&gather_rows));
  m.impl("scatter_rows", TORCH_BOX(&scatter_rows));
  m.impl("ulysses_pack", TORCH_BOX(&ulysses_pack));
  m.impl("ulysses_unpack", TORCH_BOX(&ulysses_unpack));
  m.impl("ulysses_join", TORCH_BOX(&ulysses_join));
  m.impl("ulysses_split", TORCH_BOX(&ulysses_split));
  m.impl("zero_padding_", TORCH_BOX(&zero_padding));
  m.impl("merge_lse", TORCH_BOX(&merge_lse));
  m.impl("merge_lse_grad", TORCH_BOX(&merge_lse_grad));
  m.impl("rope", TORCH_BOX(&rope));
  m.impl("cross_entropy", TORCH_BOX(&cross_entropy));
  m.impl("cross_entropy_grad", TORCH_BOX(&cross_entropy_grad));
}
