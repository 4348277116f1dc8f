// Segment attention forward on register tiles. One task is a piece of q rows with all query heads
// of one KV head; its keys are packed chunk by chunk into the thread's scratch and shared by those
// rows. Scores live in base 2: t = score * log2(e), and so do the running maxima.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "plan.h"
#include "tiles.h"

namespace mdcp {

constexpr float kLog2e = 1.44269504088896341f;
constexpr float kLn2 = 0.693147180559945309f;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// softcap * tanh(x / softcap), times log2(e); `x` are scaled scores.
template <class S>
typename S::V capped(typename S::V x, float softcap) {
  using V = typename S::V;
  const V two = S::set(2.0f), one = S::set(1.0f);
  // tanh(y) = 1 - 2 / (exp(2 y) + 1)
  const V e = S::exp2(S::mul(x, S::set(2.0f * kLog2e / softcap)));
  const V t = S::sub(one, S::div(two, S::add(e, one)));
  return S::mul(t, S::set(softcap * kLog2e));
}

template <class S, class M>
struct Forward {
  using T = Tiles<S, M>;
  using V = typename S::V;
  static constexpr int W = S::W;
  static constexpr int64_t kChunk = 256;  // keys packed at once
  static constexpr int64_t kStrip = 12;   // rows whose scores are alive at once
  static constexpr int64_t kRows = 256;   // rows of a task, over its heads

  const ForwardArgs& a;
  const SegmentList& list;
  const int64_t group, dim, du, depth, wide, panels;
  const bool past;  // out is written around the caches
  float *q, *keys, *values, *acc, *top, *sum, *scores, *probs, *spare;

  static int64_t piece_rows(const Shape& s) {
    return std::max<int64_t>(kStrip, kRows / (s.heads / s.kv_heads));
  }

  Forward(const ForwardArgs& args, const SegmentList& segments)
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
    const int64_t rows = round_up(group * piece_rows(args.shape), 16);
    float* at = scratch_floats(rows * (depth + wide + 2) + kChunk * depth + kChunk * wide +
                               panels * T::kPanel * kChunk + 2 * kStrip * kChunk +
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
    sum = take(rows);
    scores = take(kStrip * kChunk);
    probs = M::kPairs ? take(kStrip * kChunk / T::kPer) : scores;
    spare = take(W * std::max(depth, wide));
  }

  // KV heads [first, last) of one piece.
  void run(const Task& task) {
    for (int64_t kv = task.first_head; kv < task.last_head; ++kv) {
      run(task.piece, kv);
    }
    if (past) S::fence();
  }

 private:
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
      T::pack_rows(q + g * piece.len * depth, depth, a.q, piece.start, head, piece.len, dim);
      for (int64_t r = 0; r < piece.len; ++r) {
        const int64_t m = g * piece.len + r;
        const float old = a.merge ? *stat(head, piece.start + r) : -kInfinity;
        float* line = acc + m * wide;
        for (int64_t d = 0; d < wide; d += W) S::store(line + d, S::zero());
        top[m] = old * kLog2e;
        sum[m] = 0.0f;
        if (old != -kInfinity) {  // the running result is one more term of the softmax
          T::load_floats(line, a.out, piece.start + r, head, dim);
          sum[m] = 1.0f;
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
        const int64_t first = lo / W, last = (hi + W - 1) / W, m = h * piece.len + r;
        T::template product<false>(rows, first, last, du, q + m * depth, depth, keys,
                                   depth * T::kPanel, scores, kChunk);
        for (int64_t x = 0; x < rows; ++x) {
          const int64_t see = std::max<int64_t>(0, g.first_key(i + x) - c);
          const int64_t end = std::min(n, g.last_key(i + x) - c);
          softmax_row(x, m + x, first * W, last * W, see, std::max(see, end));
          if (a.options.dropout.probability > 0) {
            drop_row(x, piece.start + r + x, kv * group + h, first * W, last * W, key, n);
          }
          if constexpr (M::kPairs) {
            M::narrow(probs + x * (kChunk / T::kPer) + first * W / T::kPer,
                      scores + x * kChunk + first * W, (last - first) * W);
          }
        }
        T::template product<true>(rows, 0, wide / W, (last - first) * W / T::kPer,
                                  probs + first * W / T::kPer, kChunk / T::kPer,
                                  values + first * W / T::kPer * T::kPanel, value_panel,
                                  acc + m * wide, wide);
      }
    }
  }

  // Scores of row x in columns [first, last) become probabilities; only [see, end) are visible.
  void softmax_row(int64_t x, int64_t m, int64_t first, int64_t last, int64_t see, int64_t end) {
    float* s = scores + x * kChunk;
    float factor = static_cast<float>(a.options.scale) * kLog2e;
    if (a.options.softcap > 0 || factor < 0) {
      transform(s, first, last);
      factor = 1.0f;
    }
    const V hidden = S::set(-kInfinity);
    V high = hidden;
    for (int64_t j = first; j < last; j += W) {
      V x = S::load(s + j);
      if (j < see || j + W > end) x = S::within(x, see - j, end - j, hidden);
      high = S::max(high, x);
    }
    const float before = top[m];
    const float now = std::max(before, S::highest(high) * factor);
    const float base = now == -kInfinity ? 0.0f : now;
    const V f = S::set(factor), b = S::set(-base);
    V total = S::zero();
    for (int64_t j = first; j < last; j += W) {
      V p = S::exp2(S::fma(S::load(s + j), f, b));
      if (j < see || j + W > end) p = S::within(p, see - j, end - j, S::zero());
      S::store(s + j, p);
      total = S::add(total, p);
    }
    if (now != before && before != -kInfinity) {
      const V shrink = S::exp2(S::set(before - base));
      float one[W];
      S::store(one, shrink);
      sum[m] *= one[0];
      float* line = acc + m * wide;
      for (int64_t d = 0; d < wide; d += W) S::store(line + d, S::mul(S::load(line + d), shrink));
    }
    top[m] = now;
    sum[m] += S::sum(total);
  }

  void transform(float* s, int64_t first, int64_t last) {
    const float scale = static_cast<float>(a.options.scale);
    const float softcap = static_cast<float>(a.options.softcap);
    for (int64_t j = first; j < last; j += W) {
      const V x = S::mul(S::load(s + j), S::set(scale));
      S::store(s + j, softcap > 0 ? capped<S>(x, softcap) : S::mul(x, S::set(kLog2e)));
    }
  }

  void drop_row(int64_t x, int64_t row, int64_t head, int64_t first, int64_t last, int64_t key,
                int64_t n) {
    DropoutRow mask(a.options.dropout, row, head);
    float* s = scores + x * kChunk;
    for (int64_t j = first; j < std::min(last, n); ++j) {
      if (s[j] != 0.0f) s[j] *= static_cast<float>(mask.factor(key + j));
    }
  }

  void finish(const Piece& piece, int64_t kv) {
    for (int64_t g = 0; g < group; ++g) {
      const int64_t head = kv * group + g;
      for (int64_t r = 0; r < piece.len; ++r) {
        const int64_t m = g * piece.len + r;
        const bool live = sum[m] != 0.0f;
        const float inverse = live ? 1.0f / sum[m] : 0.0f;
        T::store_floats(a.out, piece.start + r, head, dim, acc + m * wide, inverse, false, past);
        *stat(head, piece.start + r) = live ? top[m] * kLn2 + std::log(sum[m]) : -kInfinity;
      }
    }
  }
};

template <class S, class M>
void vector_forward(const ForwardArgs& a, const SegmentList& list, const Parallel& parallel,
                    const std::vector<Task>& tasks) {
  parallel(static_cast<int64_t>(tasks.size()),
           [&](int64_t i) { Forward<S, M>(a, list).run(tasks[i]); });
}

}  // namespace mdcp
