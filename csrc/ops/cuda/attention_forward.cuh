// Forward attention on tensor cores (mma.sync m16n8k16): one tile of BM query rows at a time, keys
// and values in blocks of BN, softmax online in base 2, scores and weights in registers.
//
// K and V have one buffer each and take turns: V of this block is copied while its scores are
// computed, K of the next while the weights multiply V.
#pragma once

#include "attention_launch.cuh"
#include "tile.cuh"

namespace mdcp::cuda {

struct ForwardParams {
  MdcpRows q, k, v, out;
  float* lse;
  int64_t lse_head_stride;
  PlanView plan;
  int heads, group, head_dim;  // group: query heads per KV head
  float scale, softcap;
  bool merge;
};

template <class Element, int HEAD_DIM, int BLOCK_M, int BLOCK_N, int WARPS>
struct ForwardShape {
  using T = Element;
  static constexpr int D = HEAD_DIM, BM = BLOCK_M, BN = BLOCK_N;
  static constexpr int threads = WARPS * kWarp;
  static constexpr int MT = BM / (16 * WARPS);  // 16-row tiles of one warp
  static_assert(MT * 16 * WARPS == BM && D % 16 == 0 && BN % 16 == 0);
  static constexpr int64_t shared_bytes = int64_t(BM + 2 * BN) * tile_stride<D> * sizeof(T);
};

// Softmax state of one warp's rows: [m-tile][upper or lower row of a fragment].
template <class S>
struct Running {
  float o[S::MT][S::D / 8][4];
  float maximum[S::MT][2];  // of the scores, in units of 1 / multiplier
  float sum[S::MT][2];      // this lane's share
};

template <class S>
MDCP_DEVICE void softmax_step(Running<S>& run, float (&s)[S::MT][S::BN / 8][4], float multiplier) {
  MDCP_UNROLL
  for (int mt = 0; mt < S::MT; ++mt) {
    MDCP_UNROLL
    for (int half = 0; half < 2; ++half) {
      float top = run.maximum[mt][half];
      MDCP_UNROLL
      for (int n = 0; n < S::BN / 8; ++n)
        top = fmaxf(top, fmaxf(s[mt][n][2 * half], s[mt][n][2 * half + 1]));
      top = fmaxf(top, shuffle_xor(top, 1));
      top = fmaxf(top, shuffle_xor(top, 2));
      const float base = top == -infinity() ? 0.f : top * multiplier;  // no key seen yet
      const float shrink = exp2_approx(run.maximum[mt][half] * multiplier - base);
      float sum = run.sum[mt][half] * shrink;
      MDCP_UNROLL
      for (int n = 0; n < S::BN / 8; ++n) {
        MDCP_UNROLL
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          s[mt][n][e] = exp2_approx(s[mt][n][e] * multiplier - base);
          sum += s[mt][n][e];
        }
      }
      run.maximum[mt][half] = top;
      run.sum[mt][half] = sum;
      MDCP_UNROLL
      for (int n = 0; n < S::D / 8; ++n) {
        run.o[mt][n][2 * half] *= shrink;
        run.o[mt][n][2 * half + 1] *= shrink;
      }
    }
  }
}

template <class S>
MDCP_DEVICE void cap_and_mask(float (&s)[S::MT][S::BN / 8][4], const ForwardParams& p,
                              const Step& step, int rows, int first_row) {
  const int lane = fresh_thread_index() % kWarp;
  if (p.softcap > 0.f) {
    const float inner = p.scale / p.softcap;
    MDCP_UNROLL
    for (int mt = 0; mt < S::MT; ++mt) {
      MDCP_UNROLL
      for (int n = 0; n < S::BN / 8; ++n) {
        MDCP_UNROLL
        for (int e = 0; e < 4; ++e) s[mt][n][e] = p.softcap * tanh_approx(s[mt][n][e] * inner);
      }
    }
  }
  if (step.is_full(rows, S::BN)) return;
  MDCP_UNROLL
  for (int mt = 0; mt < S::MT; ++mt) {
    MDCP_UNROLL
    for (int n = 0; n < S::BN / 8; ++n) {
      MDCP_UNROLL
      for (int e = 0; e < 4; ++e) {
        const int t = first_row + mt * 16 + lane / 4 + 8 * (e / 2);
        const int c = n * 8 + 2 * (lane % 4) + e % 2;
        if (!step.sees(t, c)) s[mt][n][e] = -infinity();
      }
    }
  }
}

struct RowEnd {
  float factor, old_factor;  // of the sum over these keys; of what the row holds already
  bool write;
};

// Closes the softmax of one row: all four lanes that share it call this together.
MDCP_DEVICE RowEnd finish_row(const ForwardParams& p, const PlanTile& tile, int head, int t,
                              float maximum, float sum, float multiplier) {
  sum += shuffle_xor(sum, 1);
  sum += shuffle_xor(sum, 2);
  const bool inside = t < tile.rows, seen = sum != 0.f;  // or NaN
  float* const lse_at = p.lse + int64_t(head) * p.lse_head_stride + tile.row + t;
  float lse = seen ? maximum * multiplier * kLn2 + logf(sum) : -infinity();
  RowEnd end{seen ? 1.f / sum : 0.f, 0.f, inside && (seen || !p.merge)};
  if (p.merge) {
    const float old = inside ? *lse_at : -infinity();
    warp_sync();  // all four lanes have read it
    const float top = fmaxf(old, lse);
    if (top > -infinity()) {
      const float weight = expf(lse - top), old_weight = expf(old - top);
      lse = top + logf(weight + old_weight);
      end.factor *= weight / (weight + old_weight);
      end.old_factor = old_weight / (weight + old_weight);
    }
  }
  if (end.write && thread_index() % 4 == 0) *lse_at = lse;
  return end;
}

// One of the two rows that a lane holds of m-tile MT. Template arguments, not loop variables: nvcc
// does not unroll around the logarithm, and an index that it cannot see puts `run` in local memory.
template <class S, int MT, int HALF>
MDCP_DEVICE void finish_half(const Running<S>& run, const ForwardParams& p, const PlanTile& tile,
                             int head, int first_row, float multiplier) {
  const int lane = fresh_thread_index() % kWarp, t = first_row + MT * 16 + lane / 4 + 8 * HALF;
  const int64_t row = int64_t(tile.row) + t;
  const RowEnd end =
      finish_row(p, tile, head, t, run.maximum[MT][HALF], run.sum[MT][HALF], multiplier);
  MDCP_UNROLL
  for (int n = 0; n < S::D / 8; ++n) {
    const int column = n * 8 + 2 * (lane % 4);
    float x = run.o[MT][n][2 * HALF] * end.factor, y = run.o[MT][n][2 * HALF + 1] * end.factor;
    if (end.write && column < p.head_dim) {
      if (end.old_factor > 0.f) {
        const float* const old = row_pointer<float>(p.out, row, head) + column;
        x += end.old_factor * old[0];
        y += end.old_factor * old[1];
      }
      store_pair<typename S::T>(p.out, row, head, column, x, y, false);
    }
  }
}

template <class S, int MT = 0>
MDCP_DEVICE void finish_rows(const Running<S>& run, const ForwardParams& p, const PlanTile& tile,
                             int head, int first_row, float multiplier) {
  finish_half<S, MT, 0>(run, p, tile, head, first_row, multiplier);
  finish_half<S, MT, 1>(run, p, tile, head, first_row, multiplier);
  if constexpr (MT + 1 < S::MT) finish_rows<S, MT + 1>(run, p, tile, head, first_row, multiplier);
}

template <class S>
MDCP_KERNEL void MDCP_BOUNDS(S::threads, 1) attention_forward_kernel(const ForwardParams p) {
  using T = typename S::T;
  MDCP_DYNAMIC_SHARED(memory);
  MDCP_SHARED_ARRAY(Work, shared_work, 1);
  Work& work = shared_work[0];
  T* const q_tile = reinterpret_cast<T*>(memory);
  T* const k_tile = q_tile + S::BM * tile_stride<S::D>;
  T* const v_tile = k_tile + S::BN * tile_stride<S::D>;
  const int first_row = thread_index() / kWarp * 16 * S::MT;
  const float multiplier = p.softcap > 0.f ? kLog2e : p.scale * kLog2e;

  while (take_work(p.plan, p.heads, 1, S::BN, work)) {
    const auto load_block = [&](T* target, const MdcpRows& rows, const Step& step) {
      load_tile<T, S::BN, S::D, S::threads>(target, rows, step.row, step.head / p.group, step.count,
                                            p.head_dim);
      copy_async_commit();
    };
    Running<S> run;
    MDCP_UNROLL
    for (int mt = 0; mt < S::MT; ++mt) {
      clear(run.o[mt]);
      run.maximum[mt][0] = run.maximum[mt][1] = -infinity();
      run.sum[mt][0] = run.sum[mt][1] = 0.f;
    }
    if (work.step(0).count > 0) {
      load_tile<T, S::BM, S::D, S::threads>(q_tile, p.q, work.tile.row, work.head, work.tile.rows,
                                            p.head_dim);
      load_block(k_tile, p.k, work.step(0));
    }
    for (int i = 0; work.step(i).count > 0; ++i) {
      prepare_step(p.plan, S::BN, i + 1, work);
      copy_async_wait<0>();
      block_sync();  // K has landed for all; nobody still multiplies by the V before
      load_block(v_tile, p.v, work.step(i));
      float s[S::MT][S::BN / 8][4];
      MDCP_UNROLL
      for (int mt = 0; mt < S::MT; ++mt) clear(s[mt]);
      MDCP_UNROLL
      for (int k = 0; k < S::D; k += 16) {
        uint32_t a[S::MT][4];
        MDCP_UNROLL
        for (int mt = 0; mt < S::MT; ++mt) load_a<T, S::D>(a[mt], q_tile, first_row + 16 * mt, k);
        MDCP_UNROLL
        for (int n = 0; n < S::BN; n += 16) {
          uint32_t b[4];
          load_b_rows<T, S::D>(b, k_tile, n, k);
          MDCP_UNROLL
          for (int mt = 0; mt < S::MT; ++mt) {
            mma_16x8x16(s[mt][n / 8], a[mt], b[0], b[1], T());
            mma_16x8x16(s[mt][n / 8 + 1], a[mt], b[2], b[3], T());
          }
        }
      }
      cap_and_mask<S>(s, p, work.step(i), work.tile.rows, first_row);
      copy_async_wait<0>();
      block_sync();  // V has landed for all; nobody still multiplies by this K
      if (work.step(i + 1).count > 0) load_block(k_tile, p.k, work.step(i + 1));
      softmax_step<S>(run, s, multiplier);
      MDCP_UNROLL
      for (int k = 0; k < S::BN; k += 16) {
        uint32_t a[S::MT][4];
        MDCP_UNROLL
        for (int mt = 0; mt < S::MT; ++mt) to_a<T>(a[mt], s[mt][k / 8], s[mt][k / 8 + 1]);
        MDCP_UNROLL
        for (int n = 0; n < S::D; n += 16) {
          uint32_t b[4];
          load_b_columns<T, S::D>(b, v_tile, k, n);
          MDCP_UNROLL
          for (int mt = 0; mt < S::MT; ++mt) {
            mma_16x8x16(run.o[mt][n / 8], a[mt], b[0], b[1], T());
            mma_16x8x16(run.o[mt][n / 8 + 1], a[mt], b[2], b[3], T());
          }
        }
      }
    }
    finish_rows<S>(run, p, work.tile, work.head, first_row, multiplier);
  }
}

// Tile shapes by head dim. Four warps of 32 rows share each K and V fragment between two mma; at
// 256 the accumulators of 16 rows already fill half the registers.
template <class T, int D>
struct ForwardChoice {
  using Shape = ForwardShape<T, D, D <= 128 ? 128 : 64, D <= 96 ? 64 : 32, 4>;
};

template <class T>
int forward_of(const MdcpAttentionForward& args, void* stream) {
  const MdcpAttentionOptions& o = args.options;
  return by_head_dim(o.head_dim, [&](auto padded) {
    using S = typename ForwardChoice<T, decltype(padded)::value>::Shape;
    static_assert(S::BM == tile_rows_of(MDCP_FORWARD, S::D));
    const ForwardParams params{args.q,
                               args.k,
                               args.v,
                               args.out,
                               static_cast<float*>(args.lse),
                               args.lse_head_stride,
                               view_plan(args.plan, args.plan_blob),
                               o.heads,
                               o.heads / o.kv_heads,
                               o.head_dim,
                               float(o.scale),
                               float(o.softcap),
                               args.merge != 0};
    return launch_persistent(&attention_forward_kernel<S>, params, o.heads, S::threads,
                             S::shared_bytes, stream);
  });
}

}  // namespace mdcp::cuda
