// Segment attention forward on register tiles. One task is a piece of q rows with all query heads
// of one KV head; its keys are packed chunk by chunk into the thread's scratch and shared by those
// rows. Scores live in base 2: t = score * log2(e), and so do the running maxima.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "dropout.h"
#include "exp2_series.h"
#include "plan.h"
#include "tiles.h"

namespace mdcp {

constexpr float kLog2e = 1.44269504088896341f;
constexpr double kLn2 = 0.693147180559945309;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// softcap * tanh(x / softcap), times log2(e); `x` are scaled scores.
template <class S>
typename S::V capped(typename S::V x, float softcap) {
  using V = typename S::V;
  // tanh(y) = m / (m + 2) with m = exp(2 y) - 1 = 2^n (2^f - 1) + (2^n - 1): no cancellation near
  // zero, where softcap would multiply it. From 2 y = 33 (z = 48) on tanh is 1 in float.
  V z = S::mul(x, S::set(2.0f * kLog2e / softcap));
  z = S::min(S::set(48.0f), S::max(S::set(-48.0f), z));  // NaN stays
  const V n = S::round(z), f = S::sub(z, n), scale = S::power(n);
  const V m = S::fma(S::mul(power_series<S>(f), f), scale, S::sub(scale, S::set(1.0f)));
  return S::mul(S::div(m, S::add(m, S::set(2.0f))), S::set(softcap * kLog2e));
}

// 2^x for a weight that is rounded to bfloat16 when the units are pairs.
template <class T>
typename T::V weight(typename T::V x) {
  if constexpr (T::M::kPairs) return T::S::exp2_coarse(x);
  return T::S::exp2(x);
}

template <class T>
struct Forward {
  using S = typename T::S;
  using M = typename T::M;
  using V = typename S::V;
  static constexpr int W = S::W;
  static constexpr int64_t kChunk = T::kChunk;
  static constexpr int64_t kStrip = T::kStrip;

  const ForwardArgs& a;
  const SegmentList& list;
  const int64_t group, dim, du, depth, wide, panels;
  const bool past;  // out is written around the caches
  float *q, *keys, *values, *acc, *top, *sum, *scores, *probs, *spare, *keep;

  static int64_t least_rows(const Shape& s) {
    return std::max<int64_t>(kStrip, T::kTaskRows / (s.heads / s.kv_heads));
  }
  // With that many rows q and the sums of all heads take a MiB of float32.
  static int64_t most_rows(const Shape& s) {
    return std::max(least_rows(s), (int64_t{1} << 17) / (s.heads / s.kv_heads * s.dim));
  }

  Forward(const ForwardArgs& args, const SegmentList& segments, int64_t piece_rows)
      : a(args),
        list(segments),
        group(args.shape.heads / args.shape.kv_heads),
        dim(args.shape.dim),
        du(T::units(dim)),
        depth(round_up(du, W)),
        wide(round_up(dim, W)),
        panels(round_up(dim, T::kPanel) / T::kPanel),
        past(!args.merge &&
             T::past_caches(args.out, args.shape.total_q, args.shape.heads, args.shape.dim)) {
    const int64_t rows = round_up(group * lines(piece_rows), 16);
    float* at = scratch_floats(rows * (depth + wide + W + 1) + kChunk * depth + kChunk * wide +
                               panels * T::kPanel * kChunk + 3 * round_up(kStrip, W) * kChunk +
                               W * std::max(depth, wide) * 2 + 1024);
    auto take = [&](int64_t n) {
      float* p = at;
      at += round_up(n, 16);
      return p;
    };
    q = take(rows * depth);
    keys = take(kChunk * depth);
    values = take(panels * T::kPanel * (kChunk / T::kPer));
    acc = take(rows * wide);
    top = take(rows);
    sum = take(rows * W);
    scores = take(kStrip * kChunk);
    probs = M::kPairs ? take(kStrip * kChunk / T::kPer) : scores;
    spare = take(W * std::max(depth, wide));
    keep = take(round_up(kStrip, W) * kChunk);
  }

  // KV heads [first, last) of one piece.
  void run(const Task& task) {
    const typename T::Session session;
    for (int64_t kv = task.first_head; kv < task.last_head; ++kv) {
      run(task.piece, kv);
    }
    if (past) S::fence();
  }

 private:
  // Rows of scratch between two heads of a piece.
  static int64_t lines(int64_t rows) { return round_up(rows, T::kRowStep); }

  void run(const Piece& piece, int64_t kv) {
    const bool empty = piece.first_ref == piece.last_ref;
    if (a.merge && empty) return;
    begin(piece, kv);
    for (int32_t ref = piece.first_ref; ref < piece.last_ref; ++ref) {
      const Segment& g = list.segments[list.q.refs[ref]];
      const int64_t i0 = piece.start - g.q_start;
      const int64_t lo = g.first_key(i0), hi = g.last_key(i0 + piece.len - 1);
      for (int64_t c = lo / kChunk * kChunk; c < hi; c += kChunk) {
        chunk(piece, g, kv, c, std::min(kChunk, hi - c));
      }
    }
    finish(piece, kv);
  }

  float* stat(int64_t head, int64_t row) const {
    return static_cast<float*>(a.lse.data) + head * a.lse.head_stride + row * a.lse.row_stride;
  }

  void begin(const Piece& piece, int64_t kv) {
    for (int64_t g = 0; g < group; ++g) {
      const int64_t head = kv * group + g;
      const int64_t above = g * lines(piece.len);
      T::pack_rows(q + above * depth, depth, a.q, piece.start, head, piece.len, dim);
      for (int64_t r = 0; r < piece.len; ++r) {
        const int64_t m = above + r;
        const float old = a.merge ? *stat(head, piece.start + r) : -kInfinity;
        float* line = acc + m * wide;
        for (int64_t d = 0; d < wide; d += W) S::store(line + d, S::zero());
        top[m] = old * kLog2e;
        S::store(sum + m * W, S::zero());
        if (old != -kInfinity) {  // the running result is one more term of the softmax
          T::load_floats(line, a.out, piece.start + r, head, dim);
          sum[m * W] = 1.0f;
        }
      }
    }
  }

  // Keys [c, c + n) of segment g.
  void chunk(const Piece& piece, const Segment& g, int64_t kv, int64_t c, int64_t n) {
    const int64_t key = g.k_start + c, value_panel = (kChunk / T::kPer) * T::kPanel;
    T::pack_transposed(keys, depth, a.k, key, kv, n, dim, spare);
    T::pack_natural(values, value_panel, a.v, key, kv, n, dim, spare);
    for (int64_t h = 0; h < group; ++h) {
      for (int64_t r = 0; r < piece.len; r += kStrip) {
        const int64_t rows = std::min(kStrip, piece.len - r), i = piece.start + r - g.q_start;
        const int64_t lo = std::max<int64_t>(0, g.first_key(i) - c);
        const int64_t hi = std::min(n, g.last_key(i + rows - 1) - c);
        if (lo >= hi) continue;
        const int64_t first = lo / (W * T::kColumnStep) * T::kColumnStep;
        const int64_t last = round_up((hi + W - 1) / W, T::kColumnStep);
        const int64_t m = h * lines(piece.len) + r;
        T::template product<false>(rows, first, last, du, q + m * depth, depth, keys,
                                   depth * T::kPanel, scores, kChunk);
        const bool drop = a.options.dropout.probability > 0;
        if (drop) fill_keep(piece.start + r, rows, kv * group + h, key, first * W, last * W, n);
        // All maxima first: the long way through one does not hold up the next row's.
        for (int64_t x = 0; x < rows; ++x) raise(x, m + x, columns(g, i + x, c, n, first, last));
        for (int64_t x = 0; x < rows; ++x) {
          weigh(x, m + x, columns(g, i + x, c, n, first, last), drop);
        }
        T::template product<true>(rows, 0, wide / W, (last - first) * W / T::kPer,
                                  probs + first * W / T::kPer, kChunk / T::kPer,
                                  values + first * W / T::kPer * T::kPanel, value_panel,
                                  acc + m * wide, wide);
      }
    }
  }

  // Columns [first, last) of a row have scores, [see, end) of them are visible, and the vectors
  // [from, to) are so as a whole.
  struct Columns {
    int64_t first, last, see, end, from, to;

    template <class F>
    void each(const F& f) const {  // f(column, whether part of the vector may be hidden)
      for (int64_t j = first; j < from; j += W) f(j, std::true_type{});
      for (int64_t j = from; j < to; j += W) f(j, std::false_type{});
      for (int64_t j = to; j < last; j += W) f(j, std::true_type{});
    }
  };

  // Row i of segment g against the chunk of n keys at c; first and last in vectors.
  static Columns columns(const Segment& g, int64_t i, int64_t c, int64_t n, int64_t first,
                         int64_t last) {
    Columns w{first * W, last * W, 0, 0, 0, 0};
    w.see = std::clamp(g.first_key(i) - c, w.first, w.last);
    w.end = std::clamp(std::min(n, g.last_key(i) - c), w.see, w.last);
    w.from = round_up(w.see, W);
    w.to = std::max(w.from, w.end / W * W);
    return w;
  }

  // The maximum of row m takes in the scores of strip row x: what the row has is scaled down to it.
  void raise(int64_t x, int64_t m, const Columns& w) {
    float* s = scores + x * kChunk;
    float factor = static_cast<float>(a.options.scale) * kLog2e;
    if (transformed()) {
      transform(s, w.first, w.last);
      factor = 1.0f;
    }
    const V hidden = S::set(-kInfinity);
    V high = hidden;
    w.each([&](int64_t j, auto edge) {
      V t = S::load(s + j);
      if constexpr (edge) t = S::within(t, w.see - j, w.end - j, hidden);
      high = S::max(high, t);
    });
    const float before = top[m];
    const float now = std::max(before, S::highest(high) * factor);
    if (now == before) return;
    top[m] = now;
    if (before == -kInfinity) return;
    const V shrink = S::exp2(S::set(before - now));
    S::store(sum + m * W, S::mul(S::load(sum + m * W), shrink));
    float* line = acc + m * wide;
    for (int64_t d = 0; d < wide; d += W) S::store(line + d, S::mul(S::load(line + d), shrink));
  }

  // Its scores become weights, in `probs`. `drop`: after they are summed they are multiplied by the
  // factors in `keep`.
  void weigh(int64_t x, int64_t m, const Columns& w, bool drop) {
    const float* s = scores + x * kChunk;
    float* p = probs + x * kChunk / T::kPer;
    const float* kept = keep + x * kChunk;
    const float factor = transformed() ? 1.0f : static_cast<float>(a.options.scale) * kLog2e;
    const V f = S::set(factor), base = S::set(top[m] == -kInfinity ? 0.0f : top[m]);
    V total = S::load(sum + m * W);
    w.each([&](int64_t j, auto edge) {
      V t = weight<T>(S::fms(S::load(s + j), f, base));
      if constexpr (edge) t = S::within(t, w.see - j, w.end - j, S::zero());
      total = S::add(total, t);
      if (drop) t = S::mul(t, S::load(kept + j));
      if constexpr (M::kPairs) {
        M::narrow(p + j / T::kPer, t);
      } else {
        S::store(p + j, t);
      }
    });
    S::store(sum + m * W, total);
  }

  // Whether scores are made anew before the softmax; else it scales them on the way.
  bool transformed() const { return a.options.softcap > 0 || a.options.scale < 0; }

  void transform(float* s, int64_t first, int64_t last) {
    const float scale = static_cast<float>(a.options.scale);
    const float softcap = static_cast<float>(a.options.softcap);
    for (int64_t j = first; j < last; j += W) {
      const V x = S::mul(S::load(s + j), S::set(scale));
      S::store(s + j, softcap > 0 ? capped<S>(x, softcap) : S::mul(x, S::set(kLog2e)));
    }
  }

  // Dropout factors of `rows` rows from `row` on against columns [first, last) of the chunk at
  // `key`; it has n keys.
  void fill_keep(int64_t row, int64_t rows, int64_t head, int64_t key, int64_t first, int64_t last,
                 int64_t n) {
    alignas(64) float block[W * W];
    for (int64_t r = 0; r < rows; r += W) {
      DropoutLanes<S> lanes(a.options.dropout, row + r, std::min<int64_t>(W, rows - r), head);
      for (int64_t j = first; j < last; j += W) {
        for (int64_t c = 0; c < W; ++c) {
          S::store(block + c * W, j + c < n ? lanes.factors(key + j + c) : S::zero());
        }
        S::transpose(block, W, keep + r * kChunk + j, kChunk);
      }
    }
  }

  void finish(const Piece& piece, int64_t kv) {
    for (int64_t g = 0; g < group; ++g) {
      const int64_t head = kv * group + g;
      for (int64_t r = 0; r < piece.len; ++r) {
        const int64_t m = g * lines(piece.len) + r;
        const float total = S::sum(S::load(sum + m * W));
        const bool live = total != 0.0f;
        const float inverse = live ? 1.0f / total : 0.0f;
        T::store_floats(a.out, piece.start + r, head, dim, acc + m * wide, inverse, false, past);
        // In double: the backward's weights have the error of lse.
        const double log = double{top[m]} * kLn2 + double{std::log(total)};
        *stat(head, piece.start + r) = live ? static_cast<float>(log) : -kInfinity;
      }
    }
  }
};

template <class T>
void vector_forward(const ForwardArgs& a, const SegmentList& list, const Parallel& parallel,
                    const std::vector<Task>& tasks) {
  parallel(static_cast<int64_t>(tasks.size()),
           [&](int64_t i) { Forward<T>(a, list, tasks[i].piece.len).run(tasks[i]); });
}

}  // namespace mdcp
