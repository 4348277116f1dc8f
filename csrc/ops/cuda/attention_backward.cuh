// Backward attention on tensor cores, in two kernels that recompute the weights from lse:
//   * q: a tile of query rows walks over its keys and sums dq;
//   * kv: a tile of keys walks over the query rows that see it, for each query head of its KV head,
//     and sums dk and dv.
// Each sum has one owner and one order, so the result is deterministic and nothing is added
// atomically. The price is computing the scores twice: 7 products against 5 of a fused kernel.
//
// With s the score in natural units, P = exp(s - lse), dP = dout v^T:
//   dS = P * (dP - delta) * (1 - (s / softcap)^2), dq = scale dS k, dk = scale dS^T q, dv = P^T
//   dout.
#pragma once

#include "attention_launch.cuh"
#include "tile.cuh"

namespace mdcp::cuda {

struct BackwardParams {
  MdcpRows q, k, v, dout, dq, dk, dv;
  const float *lse, *delta;
  int64_t lse_head_stride, delta_head_stride;
  PlanView plan;
  int heads, kv_heads, group, head_dim;
  float scale, softcap;
  bool accumulate;
};

inline BackwardParams backward_params(const MdcpAttentionBackward& a, const PlanView& plan) {
  const MdcpAttentionOptions& o = a.options;
  return {a.q,
          a.k,
          a.v,
          a.dout,
          a.dq,
          a.dk,
          a.dv,
          static_cast<const float*>(a.lse),
          static_cast<const float*>(a.delta),
          a.lse_head_stride,
          a.delta_head_stride,
          plan,
          o.heads,
          o.kv_heads,
          o.heads / o.kv_heads,
          o.head_dim,
          float(o.scale),
          float(o.softcap),
          a.accumulate != 0};
}

// A row that saw no key has lse -inf: as +inf it gives weight 0 to everything.
MDCP_DEVICE float usable_lse(float lse) { return lse == -infinity() ? infinity() : lse; }

struct Weight {
  float p, ds;
};

// From a raw product and dP to the weight and the gradient of the raw product over scale.
MDCP_DEVICE Weight weight_of(float raw, float dp, float lse, float delta, float scale,
                             float softcap, bool visible) {
  float score = raw * scale, slope = 1.f;
  if (softcap > 0.f) {
    const float t = tanh_approx(score / softcap);
    score = softcap * t;
    slope = 1.f - t * t;
  }
  Weight w;
  w.p = visible ? exp2_approx((score - lse) * kLog2e) : 0.f;
  w.ds = w.p * (dp - delta) * slope;
  return w;
}

template <class Element, int HEAD_DIM, int BLOCK_M, int BLOCK_N, int WARPS>
struct BackwardQShape {
  using T = Element;
  static constexpr int D = HEAD_DIM, BM = BLOCK_M, BN = BLOCK_N;
  static constexpr int threads = WARPS * kWarp;
  static_assert(BM == 16 * WARPS && BN % 16 == 0);
  static constexpr int64_t shared_bytes = int64_t(2 * BM + 4 * BN) * tile_stride<D> * sizeof(T);
};

template <class S>
MDCP_KERNEL void MDCP_BOUNDS(S::threads, 1) attention_backward_q_kernel(const BackwardParams p) {
  using T = typename S::T;
  MDCP_DYNAMIC_SHARED(memory);
  MDCP_SHARED_ARRAY(Work, shared_work, 1);
  Work& work = shared_work[0];
  constexpr int kv_elements = S::BN * tile_stride<S::D>;
  T* const q_tile = reinterpret_cast<T*>(memory);
  T* const dout_tile = q_tile + S::BM * tile_stride<S::D>;
  T* const kv_tiles = dout_tile + S::BM * tile_stride<S::D>;  // [stage][k, v]
  const int lane = thread_index() % kWarp, first_row = thread_index() / kWarp * 16;

  while (take_work(p.plan, p.heads, 1, S::BN, work)) {
    const int head = work.head, rows = work.tile.rows;
    if (work.step(0).count == 0 && p.accumulate) continue;
    const auto load_step = [&](const Step& step, int stage) {
      T* const k_tile = kv_tiles + stage * 2 * kv_elements;
      const int kv_head = step.head / p.group;
      load_tile<T, S::BN, S::D, S::threads>(k_tile, p.k, step.row, kv_head, step.count, p.head_dim);
      load_tile<T, S::BN, S::D, S::threads>(k_tile + kv_elements, p.v, step.row, kv_head,
                                            step.count, p.head_dim);
      copy_async_commit();
    };
    if (work.step(0).count > 0) {
      load_tile<T, S::BM, S::D, S::threads>(q_tile, p.q, work.tile.row, head, rows, p.head_dim);
      load_tile<T, S::BM, S::D, S::threads>(dout_tile, p.dout, work.tile.row, head, rows,
                                            p.head_dim);
      load_step(work.step(0), 0);
    }
    float lse[2], delta[2];
    MDCP_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int t = first_row + lane / 4 + 8 * half;
      const int64_t row = int64_t(work.tile.row) + t;
      lse[half] = infinity();
      delta[half] = 0.f;
      if (t < rows) {
        lse[half] = usable_lse(p.lse[int64_t(head) * p.lse_head_stride + row]);
        delta[half] = p.delta[int64_t(head) * p.delta_head_stride + row];
      }
    }
    float dq[S::D / 8][4];
    clear(dq);
    for (int i = 0; work.step(i).count > 0; ++i) {
      prepare_step(p.plan, S::BN, i + 1, work);
      T* const k_tile = kv_tiles + i % 2 * 2 * kv_elements;
      copy_async_wait<0>();
      block_sync();  // this step has landed for all; nobody still reads the other stage
      if (work.step(i + 1).count > 0) load_step(work.step(i + 1), (i + 1) % 2);
      float s[S::BN / 8][4], dp[S::BN / 8][4];
      clear(s);
      clear(dp);
      multiply_rows<T, S::D, S::BN>(s, q_tile, first_row, k_tile);
      multiply_rows<T, S::D, S::BN>(dp, dout_tile, first_row, k_tile + kv_elements);
      const Step step = work.step(i);
      const bool full = step.is_full(rows, S::BN);
      MDCP_UNROLL
      for (int n = 0; n < S::BN / 8; ++n) {
        MDCP_UNROLL
        for (int e = 0; e < 4; ++e) {
          const int t = first_row + lane / 4 + 8 * (e / 2), c = n * 8 + 2 * (lane % 4) + e % 2;
          s[n][e] = weight_of(s[n][e], dp[n][e], lse[e / 2], delta[e / 2], p.scale, p.softcap,
                              full || step.sees(t, c))
                        .ds;
        }
      }
      multiply_registers<T, S::D, S::BN, S::D>(dq, s, k_tile, 0);
    }
    MDCP_UNROLL
    for (int n = 0; n < S::D / 8; ++n) {
      MDCP_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int t = first_row + lane / 4 + 8 * half, column = n * 8 + 2 * (lane % 4);
        if (t < rows && column < p.head_dim)
          store_pair<T>(p.dq, int64_t(work.tile.row) + t, head, column, dq[n][2 * half] * p.scale,
                        dq[n][2 * half + 1] * p.scale, p.accumulate);
      }
    }
  }
}

// SPLIT warps share 16 keys and own D / SPLIT columns of dk and dv each: at D 256 the two
// accumulators of one warp would not fit its registers.
template <class Element, int HEAD_DIM, int BLOCK_K, int BLOCK_Q, int SPLIT_>
struct BackwardKvShape {
  using T = Element;
  static constexpr int D = HEAD_DIM, BK = BLOCK_K, BQ = BLOCK_Q, SPLIT = SPLIT_;
  static constexpr int threads = BK / 16 * SPLIT * kWarp;
  static constexpr int columns = D / SPLIT;
  static_assert(BQ % 16 == 0 && columns % 16 == 0 && 2 * BQ <= threads);
  static constexpr int stage_elements = 2 * BQ * tile_stride<D>;
  static constexpr int64_t shared_bytes =
      int64_t(2 * BK * tile_stride<D> + 2 * stage_elements) * sizeof(T) + 4 * BQ * sizeof(float);
};

// One stage: BQ rows of q and dout and their lse and delta.
template <class S>
MDCP_DEVICE void load_queries(typename S::T* tiles, float* rows, const BackwardParams& p,
                              const Step& step) {
  using T = typename S::T;
  const int head = step.head;
  load_tile<T, S::BQ, S::D, S::threads>(tiles, p.q, step.row, head, step.count, p.head_dim);
  load_tile<T, S::BQ, S::D, S::threads>(tiles + S::stage_elements / 2, p.dout, step.row, head,
                                        step.count, p.head_dim);
  copy_async_commit();
  const int c = thread_index() % S::BQ;
  const int64_t row = int64_t(step.row) + c;
  if (thread_index() < S::BQ)
    rows[c] =
        c < step.count ? usable_lse(p.lse[int64_t(head) * p.lse_head_stride + row]) : infinity();
  else if (thread_index() < 2 * S::BQ)
    rows[S::BQ + c] = c < step.count ? p.delta[int64_t(head) * p.delta_head_stride + row] : 0.f;
}

template <class S>
MDCP_KERNEL void MDCP_BOUNDS(S::threads, 1) attention_backward_kv_kernel(const BackwardParams p) {
  using T = typename S::T;
  MDCP_DYNAMIC_SHARED(memory);
  MDCP_SHARED_ARRAY(Work, shared_work, 1);
  Work& work = shared_work[0];
  T* const k_tile = reinterpret_cast<T*>(memory);
  T* const v_tile = k_tile + S::BK * tile_stride<S::D>;
  T* const stages = v_tile + S::BK * tile_stride<S::D>;
  float* const stage_rows = reinterpret_cast<float*>(stages + 2 * S::stage_elements);
  const int lane = thread_index() % kWarp, warp = thread_index() / kWarp;
  const int first_key = warp % (S::BK / 16) * 16, first_column = warp / (S::BK / 16) * S::columns;

  while (take_work(p.plan, p.kv_heads, p.group, S::BQ, work)) {
    const int kv_head = work.head / p.group, rows = work.tile.rows;
    if (work.step(0).count == 0 && p.accumulate) continue;
    float dk[S::columns / 8][4], dv[S::columns / 8][4];
    clear(dk);
    clear(dv);
    if (work.step(0).count > 0) {
      load_tile<T, S::BK, S::D, S::threads>(k_tile, p.k, work.tile.row, kv_head, rows, p.head_dim);
      load_tile<T, S::BK, S::D, S::threads>(v_tile, p.v, work.tile.row, kv_head, rows, p.head_dim);
      load_queries<S>(stages, stage_rows, p, work.step(0));
    }
    for (int i = 0; work.step(i).count > 0; ++i) {
      prepare_step(p.plan, S::BQ, i + 1, work);
      const int stage = i % 2, other = (i + 1) % 2;
      copy_async_wait<0>();
      block_sync();  // this step has landed for all; nobody still reads the other stage
      if (work.step(i + 1).count > 0)
        load_queries<S>(stages + other * S::stage_elements, stage_rows + other * 2 * S::BQ, p,
                        work.step(i + 1));
      const T* const q_tile = stages + stage * S::stage_elements;
      const T* const dout_tile = q_tile + S::stage_elements / 2;
      const float* const lse = stage_rows + stage * 2 * S::BQ;
      const float* const delta = lse + S::BQ;
      // Transposed: rows are keys, columns are queries.
      float s[S::BQ / 8][4], dp[S::BQ / 8][4];
      clear(s);
      clear(dp);
      multiply_rows<T, S::D, S::BQ>(s, k_tile, first_key, q_tile);
      multiply_rows<T, S::D, S::BQ>(dp, v_tile, first_key, dout_tile);
      const Step step = work.step(i);
      const bool full = step.is_full(rows, S::BQ);
      MDCP_UNROLL
      for (int n = 0; n < S::BQ / 8; ++n) {
        MDCP_UNROLL
        for (int e = 0; e < 4; ++e) {
          const int t = first_key + lane / 4 + 8 * (e / 2), c = n * 8 + 2 * (lane % 4) + e % 2;
          const Weight w = weight_of(s[n][e], dp[n][e], lse[c], delta[c], p.scale, p.softcap,
                                     full || step.sees(t, c));
          s[n][e] = w.p;
          dp[n][e] = w.ds;
        }
      }
      multiply_registers<T, S::D, S::BQ, S::columns>(dv, s, dout_tile, first_column);
      multiply_registers<T, S::D, S::BQ, S::columns>(dk, dp, q_tile, first_column);
    }
    MDCP_UNROLL
    for (int n = 0; n < S::columns / 8; ++n) {
      MDCP_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int t = first_key + lane / 4 + 8 * half;
        const int column = first_column + n * 8 + 2 * (lane % 4);
        if (t >= rows || column >= p.head_dim) continue;
        const int64_t row = int64_t(work.tile.row) + t;
        store_pair<T>(p.dk, row, kv_head, column, dk[n][2 * half] * p.scale,
                      dk[n][2 * half + 1] * p.scale, p.accumulate);
        store_pair<T>(p.dv, row, kv_head, column, dv[n][2 * half], dv[n][2 * half + 1],
                      p.accumulate);
      }
    }
  }
}

template <class T, int D>
struct BackwardQChoice {
  using Shape = BackwardQShape<T, D, 64, D <= 128 ? 64 : 32, 4>;
};
template <class T, int D>
struct BackwardKvChoice {
  using Shape = BackwardKvShape<T, D, 64, D <= 64 ? 64 : 32, D <= 128 ? 1 : 2>;
};

template <class T>
int backward_q_of(const MdcpAttentionBackward& args, void* stream) {
  const MdcpAttentionOptions& o = args.options;
  return by_head_dim(o.head_dim, [&](auto padded) {
    using S = typename BackwardQChoice<T, decltype(padded)::value>::Shape;
    static_assert(S::BM == tile_rows_of(MDCP_BACKWARD_Q, S::D));
    const BackwardParams params = backward_params(args, view_plan(args.q_plan, args.q_plan_blob));
    return launch_persistent(&attention_backward_q_kernel<S>, params, o.heads, S::threads,
                             S::shared_bytes, stream);
  });
}

template <class T>
int backward_kv_of(const MdcpAttentionBackward& args, void* stream) {
  const MdcpAttentionOptions& o = args.options;
  return by_head_dim(o.head_dim, [&](auto padded) {
    using S = typename BackwardKvChoice<T, decltype(padded)::value>::Shape;
    static_assert(S::BK == tile_rows_of(MDCP_BACKWARD_KV, S::D));
    const BackwardParams params = backward_params(args, view_plan(args.kv_plan, args.kv_plan_blob));
    return launch_persistent(&attention_backward_kv_kernel<S>, params, o.kv_heads, S::threads,
                             S::shared_bytes, stream);
  });
}

}  // namespace mdcp::cuda
