// Attention one row at a time, a warp per row, plain multiply-adds in the accumulation type: the
// float32 and float64 paths, dropout, and head dims or strides that the tensor cores cannot take.
//
// A warp takes 32 rows of the other axis at a time: each lane scores one of them alone, the weights
// go through shared memory, then each lane sums its own columns. Warps share nothing.
#include <cmath>

#include "attention_host.h"
#include "attention_view.cuh"
#include "dropout.cuh"
#include "numeric.cuh"
#include "plan.cuh"

namespace mdcp::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;
constexpr int kColumns = 256 / kWarp;  // at most, of one lane

template <class A, class T>
MDCP_DEVICE A dot(const T* a, const T* b, int n) {
  A sum = 0;
  for (int i = 0; i < n; ++i) sum += widen<A>(a[i]) * widen<A>(b[i]);
  return sum;
}

template <class T, class A>
MDCP_DEVICE void store(const MdcpRows& rows, int64_t row, int64_t head, int column, A value,
                       bool accumulate) {
  const int64_t at = row * rows.row_stride + head * rows.head_stride + column;
  if (rows.dtype == (sizeof(A) == 8 ? MDCP_F64 : MDCP_F32)) {
    A* const target = static_cast<A*>(rows.data) + at;
    *target = accumulate ? *target + value : value;
  } else {
    static_cast<T*>(rows.data)[at] = from_float<T>(float(value));
  }
}

template <class A>
struct Score {
  A value, slope;  // after softcap; its derivative
};

template <class A>
MDCP_DEVICE Score<A> score_of(A raw, const MdcpAttentionOptions& o) {
  const A scaled = raw * A(o.scale);
  if (!(o.softcap > 0)) return {scaled, A(1)};
  const A t = hyperbolic(scaled / A(o.softcap));
  return {A(o.softcap) * t, A(1) - t * t};
}

struct ScalarForward {
  MdcpAttentionForward args;
  PlanView plan;
};

template <class T>
MDCP_KERNEL void MDCP_BOUNDS(kThreads, 1) scalar_forward_kernel(const ScalarForward p) {
  using A = typename Accumulation<T>::type;
  MDCP_SHARED_ARRAY(Work, shared_work, 1);
  Work& work = shared_work[0];
  MDCP_SHARED_ARRAY(A, all_weights, kThreads);
  const MdcpAttentionForward& a = p.args;
  const MdcpAttentionOptions& o = a.options;
  const int lane = thread_index() % kWarp, warp = thread_index() / kWarp, dim = o.head_dim;
  A* const weights = all_weights + warp * kWarp;
  const A nothing = -infinite<A>();

  while (take_work(p.plan, o.heads, 1, kWarp, work)) {
    const PlanTile tile = work.tile;
    const int head = work.head, kv_head = head / (o.heads / o.kv_heads);
    for (int t = warp; t < tile.rows; t += kWarps) {
      const int64_t row = int64_t(tile.row) + t;
      const T* const q = row_pointer<T>(a.q, row, head);
      A* const lse_at = static_cast<A*>(a.lse) + head * a.lse_head_stride + row;
      A sums[kColumns] = {}, top = nothing, sum = 0;
      if (a.merge) {  // the running result is one more term of the softmax
        top = *lse_at;
        sum = top != nothing ? 1 : 0;
        for (int i = 0; i * kWarp + lane < dim; ++i)
          sums[i] = sum > 0 ? row_pointer<A>(a.out, row, head)[i * kWarp + lane] : A(0);
      }
      bool seen = false;
      Walk walk;
      walk.start(tile, head, 1);
      for (Step step = walk.next(p.plan, tile, kWarp); step.count > 0;
           step = walk.next(p.plan, tile, kWarp)) {
        const bool visible = step.sees(t, lane);
        const int64_t key = int64_t(step.row) + lane;
        A s = nothing;
        if (visible) s = score_of(dot<A>(q, row_pointer<T>(a.k, key, kv_head), dim), o).value;
        const A old_top = top, here = warp_max(s);
        if (here == nothing) continue;
        seen = true;
        top = here > top ? here : top;
        const A shrink = exponential(old_top - top), weight = exponential(s - top);
        sum = sum * shrink + warp_sum(weight);
        weights[lane] = visible ? weight * dropout_factor<A>(o.dropout, row, key, head) : A(0);
        warp_sync();
        for (int i = 0; i * kWarp + lane < dim; ++i) {
          A x = sums[i] * shrink;
          for (int c = 0; c < step.count; ++c)
            x +=
                weights[c] * widen<A>(row_pointer<T>(a.v, step.row + c, kv_head)[i * kWarp + lane]);
          sums[i] = x;
        }
        warp_sync();
      }
      if (a.merge && !seen) continue;
      for (int i = 0; i * kWarp + lane < dim; ++i)
        store<T>(a.out, row, head, i * kWarp + lane, sum != 0 ? sums[i] / sum : A(0), false);
      if (lane == 0) *lse_at = sum != 0 ? top + logarithm(sum) : nothing;
    }
  }
}

struct ScalarBackward {
  MdcpAttentionBackward args;
  PlanView plan;
};

// Weight with dropout applied (what multiplies v), and dS.
template <class A>
struct Gradient {
  A weight, ds;
};

template <class A, class T>
MDCP_DEVICE Gradient<A> gradient_of(const MdcpAttentionBackward& a, int64_t q_row, int64_t k_row,
                                    int head, int kv_head) {
  const MdcpAttentionOptions& o = a.options;
  const A lse = static_cast<const A*>(a.lse)[head * a.lse_head_stride + q_row];
  if (lse == -infinite<A>()) return {A(0), A(0)};
  const A delta = static_cast<const A*>(a.delta)[head * a.delta_head_stride + q_row];
  const Score<A> s = score_of(
      dot<A>(row_pointer<T>(a.q, q_row, head), row_pointer<T>(a.k, k_row, kv_head), o.head_dim), o);
  const A dp =
      dot<A>(row_pointer<T>(a.dout, q_row, head), row_pointer<T>(a.v, k_row, kv_head), o.head_dim);
  const A keep = dropout_factor<A>(o.dropout, q_row, k_row, head), p = exponential(s.value - lse);
  return {p * keep, p * (dp * keep - delta) * s.slope};
}

template <class T>
MDCP_KERNEL void MDCP_BOUNDS(kThreads, 1) scalar_backward_q_kernel(const ScalarBackward p) {
  using A = typename Accumulation<T>::type;
  MDCP_SHARED_ARRAY(Work, shared_work, 1);
  Work& work = shared_work[0];
  MDCP_SHARED_ARRAY(A, all_ds, kThreads);
  const MdcpAttentionBackward& a = p.args;
  const MdcpAttentionOptions& o = a.options;
  const int lane = thread_index() % kWarp, warp = thread_index() / kWarp, dim = o.head_dim;
  A* const ds = all_ds + warp * kWarp;

  while (take_work(p.plan, o.heads, 1, kWarp, work)) {
    const PlanTile tile = work.tile;
    const int head = work.head, kv_head = head / (o.heads / o.kv_heads);
    for (int t = warp; t < tile.rows; t += kWarps) {
      const int64_t row = int64_t(tile.row) + t;
      A dq[kColumns] = {};
      Walk walk;
      walk.start(tile, head, 1);
      for (Step step = walk.next(p.plan, tile, kWarp); step.count > 0;
           step = walk.next(p.plan, tile, kWarp)) {
        ds[lane] = step.sees(t, lane)
                       ? gradient_of<A, T>(a, row, int64_t(step.row) + lane, head, kv_head).ds
                       : A(0);
        warp_sync();
        for (int i = 0; i * kWarp + lane < dim; ++i)
          for (int c = 0; c < step.count; ++c)
            dq[i] += ds[c] * widen<A>(row_pointer<T>(a.k, step.row + c, kv_head)[i * kWarp + lane]);
        warp_sync();
      }
      for (int i = 0; i * kWarp + lane < dim; ++i)
        store<T>(a.dq, row, head, i * kWarp + lane, dq[i] * A(o.scale), a.accumulate != 0);
    }
  }
}

template <class T>
MDCP_KERNEL void MDCP_BOUNDS(kThreads, 1) scalar_backward_kv_kernel(const ScalarBackward p) {
  using A = typename Accumulation<T>::type;
  MDCP_SHARED_ARRAY(Work, shared_work, 1);
  Work& work = shared_work[0];
  MDCP_SHARED_ARRAY(A, all_weights, 2 * kThreads);
  const MdcpAttentionBackward& a = p.args;
  const MdcpAttentionOptions& o = a.options;
  const int lane = thread_index() % kWarp, warp = thread_index() / kWarp, dim = o.head_dim;
  A* const weights = all_weights + warp * 2 * kWarp;
  A* const ds = weights + kWarp;
  const int group = o.heads / o.kv_heads;

  while (take_work(p.plan, o.kv_heads, group, kWarp, work)) {
    const PlanTile tile = work.tile;
    const int kv_head = work.head / group;
    for (int t = warp; t < tile.rows; t += kWarps) {
      const int64_t row = int64_t(tile.row) + t;
      A dk[kColumns] = {}, dv[kColumns] = {};
      Walk walk;
      walk.start(tile, kv_head * group, group);
      for (Step step = walk.next(p.plan, tile, kWarp); step.count > 0;
           step = walk.next(p.plan, tile, kWarp)) {
        Gradient<A> g = {A(0), A(0)};
        if (step.sees(t, lane))
          g = gradient_of<A, T>(a, int64_t(step.row) + lane, row, step.head, kv_head);
        weights[lane] = g.weight;
        ds[lane] = g.ds;
        warp_sync();
        for (int i = 0; i * kWarp + lane < dim; ++i) {
          const int column = i * kWarp + lane;
          for (int c = 0; c < step.count; ++c) {
            dv[i] += weights[c] * widen<A>(row_pointer<T>(a.dout, step.row + c, step.head)[column]);
            dk[i] += ds[c] * widen<A>(row_pointer<T>(a.q, step.row + c, step.head)[column]);
          }
        }
        warp_sync();
      }
      for (int i = 0; i * kWarp + lane < dim; ++i) {
        store<T>(a.dk, row, kv_head, i * kWarp + lane, dk[i] * A(o.scale), a.accumulate != 0);
        store<T>(a.dv, row, kv_head, i * kWarp + lane, dv[i], a.accumulate != 0);
      }
    }
  }
}

struct DeltaParams {
  MdcpAttentionDelta args;
};

template <class A>
MDCP_DEVICE A read_as(const MdcpRows& rows, int64_t at) {
  switch (rows.dtype) {
    case MDCP_F64:
      return A(static_cast<const double*>(rows.data)[at]);
    case MDCP_F32:
      return A(static_cast<const float*>(rows.data)[at]);
    case MDCP_BF16:
      return A(to_float(static_cast<const bf16*>(rows.data)[at]));
    default:
      return A(to_float(static_cast<const fp16*>(rows.data)[at]));
  }
}

// A warp per (row, head).
template <class A>
MDCP_KERNEL void MDCP_BOUNDS(kThreads, 1) delta_kernel(const DeltaParams p) {
  const MdcpAttentionDelta& a = p.args;
  const int lane = thread_index() % kWarp;
  const int64_t items = a.rows * a.heads, step = int64_t(block_count()) * kWarps;
  for (int64_t item = int64_t(block_index()) * kWarps + thread_index() / kWarp; item < items;
       item += step) {
    const int64_t row = item / a.heads, head = item % a.heads;
    A sum = 0;
    for (int column = lane; column < a.head_dim; column += kWarp)
      sum += read_as<A>(a.out, row * a.out.row_stride + head * a.out.head_stride + column) *
             read_as<A>(a.dout, row * a.dout.row_stride + head * a.dout.head_stride + column);
    sum = warp_sum(sum);
    if (lane != 0) continue;
    if (a.dlse != nullptr) sum -= static_cast<const A*>(a.dlse)[head * a.dlse_head_stride + row];
    static_cast<A*>(a.delta)[head * a.delta_head_stride + row] = sum;
  }
}

}  // namespace

int scalar_forward(const MdcpAttentionForward& args, void* stream) {
  return by_dtype(args.options.dtype, [&](auto zero) {
    const ScalarForward params{args, view_plan(args.plan, args.plan_blob)};
    return launch_persistent(&scalar_forward_kernel<decltype(zero)>, params, args.options.heads,
                             kThreads, 0, stream);
  });
}

int scalar_backward(const MdcpAttentionBackward& args, void* stream) {
  return by_dtype(args.options.dtype, [&](auto zero) {
    using T = decltype(zero);
    const ScalarBackward kv{args, view_plan(args.kv_plan, args.kv_plan_blob)};
    const ScalarBackward q{args, view_plan(args.q_plan, args.q_plan_blob)};
    const int error = launch_persistent(&scalar_backward_kv_kernel<T>, kv, args.options.kv_heads,
                                        kThreads, 0, stream);
    if (error) return error;
    return launch_persistent(&scalar_backward_q_kernel<T>, q, args.options.heads, kThreads, 0,
                             stream);
  });
}

}  // namespace mdcp::cuda

int mdcp_cuda_attention_delta(const MdcpAttentionDelta* args, void* stream) {
  using namespace mdcp::cuda;
  const int64_t items = args->rows * args->heads;
  if (items <= 0) return 0;
  const int64_t wanted = (items + kWarps - 1) / kWarps;
  const int64_t blocks = wanted < 65535 ? wanted : 65535;
  const bool wide = args->out.dtype == MDCP_F64;
  if (wide != (args->dout.dtype == MDCP_F64)) return MDCP_CUDA_BAD_DTYPE;
  const DeltaParams params{*args};
  return wide ? launch(&delta_kernel<double>, params, blocks, kThreads, 0, stream)
              : launch(&delta_kernel<float>, params, blocks, kThreads, 0, stream);
}
