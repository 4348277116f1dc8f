// Schemas and CPU glue of the row-wise ops: lse merge, RoPE, cross-entropy.
#include <tuple>

#include "cpu/memory_bound.h"
#include "glue.h"

namespace mdcp {
namespace {

using namespace glue;
using Two = std::tuple<Tensor, Tensor>;
using MaybeTensor = std::optional<Tensor>;

MergeArgs merge_args(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b,
                     const Tensor& lse_b) {
  MergeArgs args;
  args.out_a = rows_of(out_a, "out_a");
  args.out_b = rows_of(out_b, "out_b");
  args.shape = {out_a.size(0), out_a.size(0), out_a.size(1), out_a.size(1), out_a.size(2)};
  STD_TORCH_CHECK(args.out_a.dtype == args.out_b.dtype && out_b.size(0) == out_a.size(0) &&
                      out_b.size(1) == out_a.size(1) && out_b.size(2) == out_a.size(2),
                  "out_a and out_b must have one shape and dtype.");
  args.lse_a = stat_of(lse_a, args.out_a.dtype, out_a.size(1), out_a.size(0), "lse_a");
  args.lse_b = stat_of(lse_b, args.out_a.dtype, out_a.size(1), out_a.size(0), "lse_b");
  return args;
}

Tensor like_rows(const Tensor& x) {
  return empty_cpu({x.size(0), x.size(1), x.size(2)}, x.scalar_type());
}

Tensor like_stat(const Tensor& x) { return empty_cpu({x.size(0), x.size(1)}, x.scalar_type()); }

Stat stat_view(const Tensor& t) { return {t.data_ptr(), t.stride(0), t.stride(1)}; }

Two merge_lse_op(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b,
                 const Tensor& lse_b) {
  MergeArgs args = merge_args(out_a, lse_a, out_b, lse_b);
  Tensor out = like_rows(out_a), lse = like_stat(lse_a);
  args.out = rows_of(out, "out");
  args.lse = stat_view(lse);
  merge_lse(args, pool(4 * out_a.numel()));
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> merge_lse_grad_op(
    const Tensor& dout, const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b,
    const Tensor& lse_b, MaybeTensor dlse) {
  MergeGradArgs args;
  args.forward = merge_args(out_a, lse_a, out_b, lse_b);
  args.dout = rows_of(dout, "dout");
  STD_TORCH_CHECK(args.dout.dtype == args.forward.out_a.dtype && dout.size(0) == out_a.size(0) &&
                      dout.size(1) == out_a.size(1) && dout.size(2) == out_a.size(2),
                  "dout must have the shape and dtype of out_a.");
  if (dlse) {
    args.dlse = stat_of(*dlse, args.dout.dtype, out_a.size(1), out_a.size(0), "dlse");
  }
  Tensor da = like_rows(out_a), db = like_rows(out_b);
  Tensor la = like_stat(lse_a), lb = like_stat(lse_b);
  args.dout_a = rows_of(da, "dout_a");
  args.dout_b = rows_of(db, "dout_b");
  args.dlse_a = stat_view(la);
  args.dlse_b = stat_view(lb);
  merge_lse_grad(args, pool(4 * out_a.numel()));
  return {da, la, db, lb};
}

Tensor rope_op(const Tensor& x, const Tensor& positions, const Tensor& frequencies, double scale,
               bool interleaved, bool inverse) {
  RopeArgs args;
  args.x = rows_of(x, "x");
  args.tokens = x.size(0);
  args.heads = x.size(1);
  args.dim = x.size(2);
  args.positions = indices_of(positions, args.tokens, "positions");
  STD_TORCH_CHECK(frequencies.is_cpu() && frequencies.scalar_type() == ScalarType::Double &&
                      frequencies.dim() == 1 && frequencies.is_contiguous() &&
                      2 * frequencies.numel() <= args.dim,
                  "frequencies must be a contiguous float64 CPU tensor of at most dim / 2 = ",
                  args.dim / 2, " elements; got ", frequencies.numel(), ".");
  args.frequencies = static_cast<const double*>(frequencies.data_ptr());
  args.pairs = frequencies.numel();
  args.scale = scale;
  args.interleaved = interleaved;
  args.inverse = inverse;
  Tensor out = like_rows(x);
  args.out = rows_of(out, "out");
  rope(args, pool(4 * x.numel()));
  return out;
}

CrossEntropyArgs cross_entropy_args(const Tensor& logits, const Tensor& labels,
                                    const MaybeTensor& weights) {
  CrossEntropyArgs args;
  STD_TORCH_CHECK(logits.dim() == 2 && logits.is_cpu(), "logits must be a [tokens, vocab] tensor.");
  STD_TORCH_CHECK(logits.size(1) > 0 && (logits.stride(1) == 1 || logits.numel() == 0),
                  "logits must have a vocabulary, with unit stride.");
  args.tokens = logits.size(0);
  args.vocab = logits.size(1);
  args.dtype = float_type(logits, "logits");
  args.logits = logits.data_ptr();
  args.row_stride = logits.stride(0);
  args.labels = indices_of(labels, args.tokens, "labels");
  for (int64_t t = 0; t < args.tokens; ++t) {
    STD_TORCH_CHECK(args.labels[t] < args.vocab, "label ", args.labels[t], " of token ", t,
                    " is outside the vocabulary of ", args.vocab,
                    ". Negative labels are ignored tokens.");
  }
  args.weights = nullptr;
  if (weights) {
    STD_TORCH_CHECK(weights->dim() == 1 && weights->size(0) == args.tokens &&
                        weights->is_contiguous() &&
                        weights->scalar_type() == accumulation_type(args.dtype),
                    "weights must be [tokens], contiguous, float32 (float64 for float64 logits); "
                    "got ",
                    text_of(*weights), " for ", args.tokens, " tokens.");
    args.weights = weights->data_ptr();
  }
  return args;
}

Two cross_entropy_op(const Tensor& logits, const Tensor& labels, MaybeTensor weights) {
  CrossEntropyArgs args = cross_entropy_args(logits, labels, weights);
  const ScalarType type = accumulation_type(args.dtype);
  Tensor loss = empty_cpu({}, type), lse = empty_cpu({args.tokens}, type);
  std::vector<double> losses(args.tokens);
  args.lse = lse.data_ptr();
  args.losses = losses.data();
  cross_entropy(args, pool(16 * logits.numel()));
  double total = 0;
  for (double x : losses) total += x;
  if (type == ScalarType::Double) {
    *static_cast<double*>(loss.data_ptr()) = total;
  } else {
    *static_cast<float*>(loss.data_ptr()) = static_cast<float>(total);
  }
  return {loss, lse};
}

Tensor cross_entropy_grad_op(const Tensor& dloss, const Tensor& logits, const Tensor& labels,
                             const Tensor& lse, MaybeTensor weights, MaybeTensor dlse) {
  CrossEntropyArgs args = cross_entropy_args(logits, labels, weights);
  const ScalarType type = accumulation_type(args.dtype);
  STD_TORCH_CHECK(dloss.numel() == 1 && dloss.scalar_type() == type, "dloss must be a scalar.");
  STD_TORCH_CHECK(lse.numel() == args.tokens && lse.is_contiguous() && lse.scalar_type() == type,
                  "lse must be [tokens], as cross_entropy returned it.");
  STD_TORCH_CHECK(!dlse || (dlse->numel() == args.tokens && dlse->is_contiguous() &&
                            dlse->scalar_type() == type),
                  "dlse must be [tokens], contiguous, with the dtype of lse.");
  args.lse = lse.data_ptr();
  const double scale = type == ScalarType::Double ? *static_cast<double*>(dloss.data_ptr())
                                                  : *static_cast<float*>(dloss.data_ptr());
  Tensor dlogits = empty_cpu({args.tokens, args.vocab}, logits.scalar_type());
  cross_entropy_grad(args, scale, dlse ? dlse->data_ptr() : nullptr, dlogits.data_ptr(),
                     pool(16 * logits.numel()));
  return dlogits;
}

}  // namespace
}  // namespace mdcp

STABLE_TORCH_LIBRARY_FRAGMENT(megatron_dcp, m) {
  m.def(
      "merge_lse(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) "
      "-> (Tensor out, Tensor lse)");
  m.def(
      "merge_lse_grad(Tensor dout, Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, "
      "Tensor? dlse=None) -> (Tensor dout_a, Tensor dlse_a, Tensor dout_b, Tensor dlse_b)");
  m.def(
      "rope(Tensor x, Tensor positions, Tensor frequencies, *, float scale=1.0, "
      "bool interleaved=False, bool inverse=False) -> Tensor");
  m.def(
      "cross_entropy(Tensor logits, Tensor labels, Tensor? weights=None) "
      "-> (Tensor loss, Tensor lse)");
  m.def(
      "cross_entropy_grad(Tensor dloss, Tensor logits, Tensor labels, Tensor lse, "
      "Tensor? weights=None, Tensor? dlse=None) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(megatron_dcp, CPU, m) {
  m.impl("merge_lse", TORCH_BOX(&mdcp::merge_lse_op));
  m.impl("merge_lse_grad", TORCH_BOX(&mdcp::merge_lse_grad_op));
  m.impl("rope", TORCH_BOX(&mdcp::rope_op));
  m.impl("cross_entropy", TORCH_BOX(&mdcp::cross_entropy_op));
  m.impl("cross_entropy_grad", TORCH_BOX(&mdcp::cross_entropy_grad_op));
}
