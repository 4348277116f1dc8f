// Segment attention backward on register tiles. One task is a piece of keys of one KV head; it
// walks over the q pieces that see them. All products are taken on transposed scores (rows are
// keys), so that only dq needs a transpose, once per (q piece, k piece):
//   s' = K Q', dp' = V dO', dV += p' dO, dK += ds' Q, dQ' = K' ds'.
// dV and dK stay with the task. dQ pieces are added in task order (BackwardPlan).
#pragma once

#include <thread>

#include "vector_deltas.h"
#include "vector_forward.h"

namespace mdcp {

template <class T>
struct Backward {
  using S = typename T::S;
  using M = typename T::M;
  using V = typename S::V;
  static constexpr int W = S::W;
  static constexpr int64_t kQ = T::kSweep;  // rows of a q piece: whole panels
  static constexpr int64_t kStrip = T::kStrip;
  static constexpr int64_t kQUnits = kQ / T::kPer;
  static constexpr int64_t kPanels = kQ / T::kPanel;
  // From row to row of ds: with several panels a line more, or the rows of one panel would share
  // a few sets of the cache.
  static constexpr int64_t kDs = kPanels == 1 ? kQ : kQ + 64 / sizeof(float);
  static_assert(!M::kPairs || kPanels == 1);

  const BackwardArgs& a;
  const SegmentList& list;
  const BackwardPlan& plan;
  float* partial;  // [partial rows, heads, dim], float32 sums of dq for 16-bit outputs
  const int64_t group, dim, du, depth, wide, panels, max_keys;
  const bool past_q, past_k;  // dq; dk and dv are written around the caches
  float *k_rows, *v_rows, *k_columns, *dk, *dv;
  float *q_t, *dout_t, *q_n, *dout_n, *lse, *lse_low, *delta;
  float *s, *dp, *p_a, *ds_a, *ds_b, *dq_t, *spare, *keep;

  static int64_t least_keys(const Shape& shape) {
    return shape.dim <= 64 ? T::kTaskKeys : T::kTaskKeys / 2;
  }
  // With that many keys each of their five copies takes 256 KiB of float32.
  static int64_t most_keys(const Shape& shape) {
    return std::max(least_keys(shape), (int64_t{1} << 16) / shape.dim);
  }

  Backward(const BackwardArgs& args, const SegmentList& segments, const BackwardPlan& backward,
           float* sums, int64_t piece_keys)
      : a(args),
        list(segments),
        plan(backward),
        partial(sums),
        group(args.shape.heads / args.shape.kv_heads),
        dim(args.shape.dim),
        du(T::units(dim)),
        depth(round_up(du, W)),
        wide(round_up(dim, W)),
        panels(round_up(dim, T::kPanel) / T::kPanel),
        max_keys(round_up(piece_keys, 64)),
        past_q(T::past_caches(args.dq, args.shape.total_q, args.shape.heads, args.shape.dim)),
        past_k(T::past_caches(args.dk, args.shape.total_k, args.shape.kv_heads, args.shape.dim)) {
    float* at = nullptr;
    for (int pass = 0; pass < 2; ++pass) {  // first count, then hand out
      int64_t used = 0;
      auto take = [&](float*& p, int64_t n) {
        p = at ? at + used : nullptr;
        used += round_up(n, 16);
      };
      take(k_rows, max_keys * depth);
      take(v_rows, max_keys * depth);
      take(k_columns, wide * column_stride());
      take(dk, max_keys * wide);
      take(dv, max_keys * wide);
      take(q_t, depth * kQ);
      take(dout_t, depth * kQ);
      take(q_n, panels * T::kPanel * round_up(kQUnits, W));
      take(dout_n, panels * T::kPanel * round_up(kQUnits, W));
      take(lse, kQ);
      take(lse_low, kQ);
      take(delta, kQ);
      take(s, kStrip * kQ);
      take(dp, kStrip * kDs);
      take(p_a, kStrip * kQ);
      take(ds_a, kStrip * kQ);
      take(ds_b, round_up(T::units(max_keys), W) * kDs);
      take(dq_t, wide * kQ);
      take(spare,
           std::max({W * depth, 2 * wide, panels * T::kPanel * max_keys / T::kPer, kQ * wide}));
      take(keep, kStrip * kQ);
      if (!at) at = scratch_floats(used);
    }
  }

  // KV heads [first, last) of one piece.
  void run(const Task& task) {
    const typename T::Session session;
    for (int64_t kv = task.first_head; kv < task.last_head; ++kv) {
      run(task.index, kv);
    }
    if (past_q || past_k) S::fence();
  }

 private:
  void run(int64_t piece_index, int64_t kv) {
    const Piece& piece = plan.k_pieces[piece_index];
    const bool empty = piece.first_ref == piece.last_ref;
    if (empty && a.accumulate) return;
    for (int64_t r = 0; r < piece.len * wide; r += W) {
      S::store(dk + r, S::zero());
      S::store(dv + r, S::zero());
    }
    if (!empty) {
      const int64_t panel = max_keys / T::kPer * T::kPanel;
      T::pack_rows(k_rows, depth, a.k, piece.start, kv, piece.len, dim);
      T::pack_rows(v_rows, depth, a.v, piece.start, kv, piece.len, dim);
      T::pack_natural(spare, panel, a.k, piece.start, kv, piece.len, dim, q_t);
      T::transpose_natural(k_columns, column_stride(), spare, panel, piece.len, dim);
    }
    for (int64_t h = kv * group; h < (kv + 1) * group; ++h) {
      const uint32_t* turn = plan.turns.data() + plan.first_visit[piece_index];
      for (int32_t ref = piece.first_ref; ref < piece.last_ref; ++ref) {
        const Segment& g = list.segments[list.k.refs[ref]];
        const int64_t j = piece.start - g.k_start;
        for_each_visit(plan, g, j, j + piece.len,
                       [&](int64_t q_piece) { visit(piece, g, q_piece, h, *turn++); });
      }
    }
    for (int64_t r = 0; r < piece.len; ++r) {
      T::store_floats(a.dk, piece.start + r, kv, dim, dk + r * wide, 1.0f, a.accumulate, past_k);
      T::store_floats(a.dv, piece.start + r, kv, dim, dv + r * wide, 1.0f, a.accumulate, past_k);
    }
  }

  // A line more than the keys: rows a power of two apart would share a few sets of the cache.
  int64_t column_stride() const { return round_up(T::units(max_keys), W) + 64 / sizeof(float); }

  void visit(const Piece& keys, const Segment& g, int64_t q_index, int64_t head, uint32_t turn) {
    const Piece& rows = plan.q_pieces[q_index];
    load_rows(rows, q_index, head);
    const int64_t i0 = rows.start - g.q_start, j0 = keys.start - g.k_start;
    int64_t begin[kPanels], end[kPanels];  // keys in strips that a panel of rows sees; adjacent
    for (int64_t p = 0; p < kPanels; ++p) begin[p] = keys.len, end[p] = 0;
    for (int64_t k = 0; k < keys.len; k += kStrip) {
      const int64_t n = std::min(kStrip, keys.len - k);
      const int64_t lo = std::max<int64_t>(0, g.first_row(j0 + k) - i0);
      const int64_t hi = std::min(rows.len, g.last_row(j0 + k + n - 1) - i0);
      if (lo >= hi) continue;
      strip(rows, keys, g, head, k, n, lo / (W * T::kColumnStep) * T::kColumnStep,
            round_up((hi + W - 1) / W, T::kColumnStep));
      for (int64_t p = 0; p < kPanels; ++p) {
        if (kPanels > 1 && (hi <= p * T::kPanel || lo >= (p + 1) * T::kPanel)) continue;
        begin[p] = std::min(begin[p], k);
        end[p] = k + n;
      }
    }
    bool any = false;
    for (int64_t p = 0; p < kPanels; ++p) {
      const int64_t first = begin[p] / T::kPer, count = T::units(end[p]) - first;
      const int64_t left = rows.len - p * T::kPanel;
      const int64_t columns = kPanels == 1 ? left : std::min(T::kPanel, left);
      if (begin[p] >= end[p]) {
        if (kPanels > 1) clear_dq(p * T::kPanel, columns);
        continue;
      }
      T::template product<false, kDs>(wide, 0, (columns + W - 1) / W, count, k_columns + first,
                                      column_stride(), ds_b + first * kDs + p * T::kPanel, 0,
                                      dq_t + p * T::kPanel, kQ);
      any = true;
    }
    add_dq(rows, q_index, head, turn, any);
  }

  // Zeros in dQ' for rows [first, first + count) of q, which see none of the keys.
  void clear_dq(int64_t first, int64_t count) {
    for (int64_t d = 0; d < wide; ++d) {
      for (int64_t r = first; r < first + count; r += W) S::store(dq_t + d * kQ + r, S::zero());
    }
  }

  void load_rows(const Piece& rows, int64_t q_index, int64_t head) {
    const int64_t panel = round_up(kQUnits, W) * T::kPanel;
    T::pack_transposed(q_t, depth, a.q, rows.start, head, rows.len, dim, spare);
    T::pack_transposed(dout_t, depth, a.dout, rows.start, head, rows.len, dim, spare);
    T::pack_natural(q_n, panel, a.q, rows.start, head, rows.len, dim, spare);
    T::pack_natural(dout_n, panel, a.dout, rows.start, head, rows.len, dim, spare);
    const float* l = static_cast<const float*>(a.lse.data) + head * a.lse.head_stride;
    const bool known = plan.visits[q_index] > 1;  // by all_deltas
    for (int64_t r = 0; r < kQ; ++r) {
      const float x = r < rows.len ? l[(rows.start + r) * a.lse.row_stride] : -kInfinity;
      const double base2 = double{x} / kLn2;
      lse[r] = x == -kInfinity ? kInfinity : static_cast<float>(base2);  // a dead row weighs 0
      lse_low[r] = x == -kInfinity ? 0.0f : static_cast<float>(base2 - lse[r]);
      delta[r] = x == -kInfinity ? 0.0f
                 : known         ? *delta_at(a, rows.start + r, head)
                                 : row_delta<T>(a, rows.start + r, head, spare);
    }
  }

  // Keys [k, k + n) of the piece against q columns [first, last) in vectors.
  void strip(const Piece& rows, const Piece& keys, const Segment& g, int64_t head, int64_t k,
             int64_t n, int64_t first, int64_t last) {
    // ds of one float a unit is its own row of B: it is made in place.
    if constexpr (!M::kPairs) dp = ds_b + k * kDs;
    const int64_t deep = kPanels == 1 ? 0 : depth * T::kPanel;  // from panel to panel
    T::template product<false>(n, first, last, du, k_rows + k * depth, depth, q_t, deep, s, kQ);
    T::template product<false>(n, first, last, du, v_rows + k * depth, depth, dout_t, deep, dp,
                               kDs);
    if (a.options.dropout.probability > 0) {
      fill_keep(rows, head, keys.start + k, n, first * W, last * W);
    }
    const int64_t i0 = rows.start - g.q_start, j0 = keys.start - g.k_start + k;
    const auto band = [&](int64_t x) {
      const int64_t lo = std::max<int64_t>(0, g.first_row(j0 + x) - i0);
      return Band{lo, std::max(lo, std::min(rows.len, g.last_row(j0 + x) - i0))};
    };
    const int64_t skip = first * W / T::kPer, inside = (last - first) * W / T::kPer;
    const int64_t panel = round_up(kQUnits, W) * T::kPanel;
    float *p_rows = s, *ds_rows = dp;
    if constexpr (M::kPairs) {
      for (int64_t x = 0; x < n; x += 2) {
        two_rows(x, x + 1 < n, k, first * W, last * W, band(x), band(x + 1));
      }
      p_rows = p_a;
      ds_rows = ds_a;
    } else {
      for (int64_t x = 0; x < n; ++x) one_row(x, first * W, last * W, band(x));
    }
    clear_ds(k, n, first * W, last * W);
    T::template product<true>(n, 0, wide / W, inside, p_rows + skip, kQUnits,
                              dout_n + skip * T::kPanel, panel, dv + k * wide, wide);
    T::template product<true>(n, 0, wide / W, inside, ds_rows + skip, M::kPairs ? kQUnits : kDs,
                              q_n + skip * T::kPanel, panel, dk + k * wide, wide);
  }

  struct Band {
    int64_t lo, hi;  // visible columns
  };
  struct Pair {
    V p, ds;
  };

  // From s and dp in columns [i, i + W) of row x: p after dropout, and ds; 0 outside the band.
  Pair pair(int64_t x, int64_t i, Band band) const {
    const float scale = static_cast<float>(a.options.scale);
    const float softcap = static_cast<float>(a.options.softcap);
    V t, slope = S::set(scale);
    if (softcap > 0) {
      t = capped<S>(S::mul(S::load(s + x * kQ + i), S::set(scale)), softcap);
      const V y = S::mul(t, S::set(1.0f / (softcap * kLog2e)));
      slope = S::mul(slope, S::sub(S::set(1.0f), S::mul(y, y)));
      t = S::sub(t, S::load(lse + i));
    } else {
      t = S::fms(S::load(s + x * kQ + i), S::set(scale * kLog2e), S::load(lse + i));
    }
    if constexpr (!M::kPairs) t = S::sub(t, S::load(lse_low + i));
    V p = weight<T>(t), d = S::load(dp + x * kDs + i);
    const bool edge = i < band.lo || i + W > band.hi;
    if (edge) p = S::within(p, band.lo - i, band.hi - i, S::zero());
    V dropped = p;
    if (a.options.dropout.probability > 0) {
      const V factor = S::load(keep + x * kQ + i);
      dropped = S::mul(p, factor);
      d = S::mul(d, factor);
    }
    V ds = S::mul(S::mul(p, S::sub(d, S::load(delta + i))), slope);
    // Hidden columns may hold anything, NaN too: a weight of 0 is not enough.
    if (edge) ds = S::within(ds, band.lo - i, band.hi - i, S::zero());
    return {dropped, ds};
  }

  // Row x of the strip in columns [first, last): s becomes p, dp becomes ds.
  void one_row(int64_t x, int64_t first, int64_t last, Band band) {
    for (int64_t i = first; i < last; i += W) {
      const Pair y = pair(x, i, band);
      S::store(s + x * kQ + i, y.p);
      S::store(dp + x * kDs + i, y.ds);
    }
  }

  // Rows x and, if `both`, x + 1 as units: p and ds as rows of A, ds as a row of B for dQ' too.
  void two_rows(int64_t x, bool both, int64_t k, int64_t first, int64_t last, Band low, Band high) {
    float* out = ds_b + (k + x) / 2 * kDs;
    for (int64_t i = first; i < last; i += W) {
      const Pair y = pair(x, i, low);
      M::narrow(p_a + x * kQUnits + i / 2, y.p);
      M::narrow(ds_a + x * kQUnits + i / 2, y.ds);
      Pair z{S::zero(), S::zero()};
      if (both) {
        z = pair(x + 1, i, high);
        M::narrow(p_a + (x + 1) * kQUnits + i / 2, z.p);
        M::narrow(ds_a + (x + 1) * kQUnits + i / 2, z.ds);
      }
      S::store(out + i, M::zip_floats(y.ds, z.ds));
    }
  }

  // Zeros in the rows of B that dQ' reads of this strip, outside columns [first, last).
  void clear_ds(int64_t k, int64_t n, int64_t first, int64_t last) {
    float* out = ds_b + k / T::kPer * kDs;
    const int64_t filled = T::units(n), read = round_up(filled, T::kRowStep);
    for (int64_t u = 0; u < filled; ++u, out += kDs) {
      for (int64_t i = 0; i < first; i += W) S::store(out + i, S::zero());
      for (int64_t i = last; i < kQ; i += W) S::store(out + i, S::zero());
    }
    for (int64_t i = 0; i < (read - filled) * kDs; i += W) S::store(out + i, S::zero());
  }

  // Dropout factors of n keys from `key` on against columns [first, last) of the q piece.
  void fill_keep(const Piece& rows, int64_t head, int64_t key, int64_t n, int64_t first,
                 int64_t last) {
    for (int64_t r = first; r < last; r += W) {
      if (r >= rows.len) {
        for (int64_t x = 0; x < n; ++x) S::store(keep + x * kQ + r, S::zero());
        continue;
      }
      DropoutLanes<S> lanes(a.options.dropout, rows.start + r, std::min<int64_t>(W, rows.len - r),
                            head);
      for (int64_t x = 0; x < n; ++x) S::store(keep + x * kQ + r, lanes.factors(key + x));
    }
  }

  void add_dq(const Piece& rows, int64_t q_index, int64_t head, uint32_t turn, bool any) {
    const int64_t tokens = round_up(rows.len, W);
    if (any) {
      for (int64_t d = 0; d < wide; d += W) {
        for (int64_t r = 0; r < tokens; r += W) {
          S::transpose(dq_t + d * kQ + r, kQ, spare + r * wide + d, wide);
        }
      }
    } else {
      for (int64_t i = 0; i < tokens * wide; i += W) S::store(spare + i, S::zero());
    }
    std::atomic<uint32_t>& done = plan.done[q_index * a.shape.heads + head];
    for (int spins = 0; done.load(std::memory_order_acquire) != turn; ++spins) {
      if (spins > 64) std::this_thread::yield();
    }
    const uint32_t visits = plan.visits[q_index];
    const bool last = turn + 1 == visits;
    if (a.dq.dtype == DType::kFloat32 || visits == 1) {
      const bool add = a.accumulate || turn > 0;
      for (int64_t r = 0; r < rows.len; ++r) {
        T::store_floats(a.dq, rows.start + r, head, dim, spare + r * wide, 1.0f, add,
                        past_q && visits == 1);
      }
    } else {
      const Rows sums{partial, DType::kFloat32, a.shape.heads * dim, dim};
      const int64_t base = plan.partial_row[q_index];
      for (int64_t r = 0; r < rows.len; ++r) {
        T::store_floats(sums, base + r, head, dim, spare + r * wide, 1.0f, turn > 0);
        if (last) {
          const float* total = static_cast<const float*>(sums.at(base + r, head));
          T::store_floats(a.dq, rows.start + r, head, dim, total, 1.0f, false);
        }
      }
    }
    done.store(turn + 1, std::memory_order_release);
  }
};

// Zeros in the dq rows that no task visits.
template <class T>
void zero_unseen(const BackwardArgs& a, const BackwardPlan& plan, const Parallel& parallel) {
  using S = typename T::S;
  const int64_t dim = a.shape.dim, wide = round_up(dim, S::W);
  parallel(static_cast<int64_t>(plan.unseen.size()), [&](int64_t i) {
    const Piece& piece = plan.q_pieces[plan.unseen[i]];
    float* zeros = scratch_floats(wide);
    for (int64_t d = 0; d < wide; d += S::W) S::store(zeros + d, S::zero());
    for (int64_t h = 0; h < a.shape.heads; ++h) {
      for (int64_t row = piece.start; row < piece.start + piece.len; ++row) {
        T::store_floats(a.dq, row, h, dim, zeros, 1.0f, false);
      }
    }
  });
}

template <class T>
void vector_backward(const BackwardArgs& a, const SegmentList& list, const Parallel& parallel,
                     const BackwardPlan& plan, float* partial) {
  if (!a.accumulate) zero_unseen<T>(a, plan, parallel);
  all_deltas<T>(a, plan, parallel);
  parallel(static_cast<int64_t>(plan.tasks.size()), [&](int64_t i) {
    const Task& task = plan.tasks[i];
    Backward<T>(a, list, plan, partial, task.piece.len).run(task);
  });
}

}  // namespace mdcp
