// Plain loops over rows and keys. They carry float64 (the gradient proof runs on it) and machines
// without AVX2, and they are what the vector paths are compared with.
#include <algorithm>
#include <cmath>
#include <limits>

#include "convert.h"

namespace mdcp {
namespace {

constexpr int64_t kRowsPerTask = 16;
constexpr int64_t kKeysPerStep = 64;

// Runs cut to kRowsPerTask rows, one task per (piece, head).
struct Piece {
  int64_t start, len;
  const Run* run;
};

std::vector<Piece> cut(const Axis& axis) {
  std::vector<Piece> pieces;
  for (const Run& run : axis.runs) {
    for (int64_t r = 0; r < run.len; r += kRowsPerTask) {
      pieces.push_back({run.start + r, std::min(kRowsPerTask, run.len - r), &run});
    }
  }
  return pieces;
}

template <class T>
T dot(const T* a, const T* b, int64_t n) {
  T sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

template <class T>
T cap(T s, T softcap) {
  return softcap > 0 ? softcap * std::tanh(s / softcap) : s;
}

template <class T>
struct ForwardRow {
  const ForwardArgs& a;
  const SegmentList& list;
  std::vector<T> q, k, acc;
  T m, l;

  ForwardRow(const ForwardArgs& args, const SegmentList& segments)
      : a(args), list(segments), q(args.shape.dim), k(args.shape.dim), acc(args.shape.dim) {}

  void run(const Run& run, int64_t row, int64_t head) {
    const int64_t dim = a.shape.dim;
    T& lse = static_cast<T*>(a.lse.data)[head * a.lse.head_stride + row * a.lse.row_stride];
    if (a.merge && run.first_ref == run.last_ref) return;
    m = -std::numeric_limits<T>::infinity();
    l = 0;
    std::fill(acc.begin(), acc.end(), T(0));
    if (a.merge && lse != m) {  // the running result is one more term of the softmax
      const T* old = load_row<T>(a.out, row, head, dim, k.data());
      std::copy(old, old + dim, acc.begin());
      m = lse;
      l = 1;
    }
    const T* q_row = load_row<T>(a.q, row, head, dim, q.data());
    for (int32_t ref = run.first_ref; ref < run.last_ref; ++ref) {
      segment(list.segments[list.q.refs[ref]], q_row, row, head);
    }
    const bool live = l != 0;  // or NaN
    const T inverse = live ? T(1) / l : T(0);
    for (T& x : acc) x *= inverse;
    store_row<T>(a.out, row, head, dim, acc.data(), false);
    lse = live ? m + std::log(l) : -std::numeric_limits<T>::infinity();
  }

  void segment(const Segment& g, const T* q_row, int64_t row, int64_t head) {
    const int64_t dim = a.shape.dim, kv = head / (a.shape.heads / a.shape.kv_heads);
    const int64_t i = row - g.q_start, end = g.last_key(i);
    const Dropout& drop = a.options.dropout;
    for (int64_t j0 = g.first_key(i); j0 < end; j0 += kKeysPerStep) {
      const int64_t n = std::min(kKeysPerStep, end - j0);
      T s[kKeysPerStep], top = m;
      for (int64_t j = 0; j < n; ++j) {
        const T* k_row = load_row<T>(a.k, g.k_start + j0 + j, kv, dim, k.data());
        s[j] = cap(dot(q_row, k_row, dim) * T(a.options.scale), T(a.options.softcap));
        top = std::max(top, s[j]);
      }
      // NaN is never the maximum, but it reaches the sum and so out and lse.
      const T base = top == -std::numeric_limits<T>::infinity() ? T(0) : top;
      const T shrink = std::exp(m - base);
      l *= shrink;
      for (T& x : acc) x *= shrink;
      m = top;
      for (int64_t j = 0; j < n; ++j) {
        s[j] = std::exp(s[j] - base);
        l += s[j];
      }
      if (drop.probability > 0) {
        DropoutRow mask(drop, row, head);
        for (int64_t j = 0; j < n; ++j) s[j] *= T(mask.factor(g.k_start + j0 + j));
      }
      for (int64_t j = 0; j < n; ++j) {
        const T* v_row = load_row<T>(a.v, g.k_start + j0 + j, kv, dim, k.data());
        for (int64_t d = 0; d < dim; ++d) acc[d] += s[j] * v_row[d];
      }
    }
  }
};

template <class T>
void forward(const ForwardArgs& a, const SegmentList& list, const Parallel& parallel) {
  const std::vector<Piece> pieces = cut(list.q);
  parallel(static_cast<int64_t>(pieces.size()) * a.shape.heads, [&](int64_t task) {
    const Piece& piece = pieces[task / a.shape.heads];
    ForwardRow<T> worker(a, list);
    for (int64_t r = 0; r < piece.len; ++r) {
      worker.run(*piece.run, piece.start + r, task % a.shape.heads);
    }
  });
}

// Per pair: probability p and the gradient ds of the scaled score.
template <class T>
struct Pair {
  T p_dropped, ds;
};

template <class T>
struct BackwardPairs {
  const BackwardArgs& a;

  T lse(int64_t row, int64_t head) const {
    return static_cast<T*>(a.lse.data)[head * a.lse.head_stride + row * a.lse.row_stride];
  }
  T delta(int64_t row, int64_t head) const {
    return static_cast<T*>(a.delta.data)[head * a.delta.head_stride + row * a.delta.row_stride];
  }
  Pair<T> pair(const T* q, const T* k, const T* v, const T* dout, T row_lse, T row_delta,
               T dropped) const {
    const int64_t dim = a.shape.dim;
    const T softcap = T(a.options.softcap);
    const T s = cap(dot(q, k, dim) * T(a.options.scale), softcap);
    const T p = std::exp(s - row_lse);
    T ds = p * (dot(dout, v, dim) * dropped - row_delta) * T(a.options.scale);
    if (softcap > 0) ds *= T(1) - (s / softcap) * (s / softcap);
    return {p * dropped, ds};
  }
};

template <class T>
void compute_delta(const BackwardArgs& a, const Parallel& parallel) {
  const int64_t dim = a.shape.dim;
  parallel(a.shape.total_q, [&](int64_t row) {
    std::vector<T> x(dim), y(dim);
    for (int64_t h = 0; h < a.shape.heads; ++h) {
      T d = dot(load_row<T>(a.out, row, h, dim, x.data()),
                load_row<T>(a.dout, row, h, dim, y.data()), dim);
      if (a.dlse.data) {
        d -= static_cast<T*>(a.dlse.data)[h * a.dlse.head_stride + row * a.dlse.row_stride];
      }
      static_cast<T*>(a.delta.data)[h * a.delta.head_stride + row * a.delta.row_stride] = d;
    }
  });
}

template <class T>
void backward_q(const BackwardArgs& a, const SegmentList& list, const Parallel& parallel) {
  const std::vector<Piece> pieces = cut(list.q);
  const int64_t dim = a.shape.dim, group = a.shape.heads / a.shape.kv_heads;
  const BackwardPairs<T> pairs{a};
  parallel(static_cast<int64_t>(pieces.size()) * a.shape.heads, [&](int64_t task) {
    const Piece& piece = pieces[task / a.shape.heads];
    const int64_t head = task % a.shape.heads;
    std::vector<T> q(dim), k(dim), v(dim), dout(dim), dq(dim);
    for (int64_t row = piece.start; row < piece.start + piece.len; ++row) {
      std::fill(dq.begin(), dq.end(), T(0));
      const T row_lse = pairs.lse(row, head), row_delta = pairs.delta(row, head);
      const T* q_row = load_row<T>(a.q, row, head, dim, q.data());
      const T* dout_row = load_row<T>(a.dout, row, head, dim, dout.data());
      const bool alive = row_lse != -std::numeric_limits<T>::infinity();
      for (int32_t ref = piece.run->first_ref; alive && ref < piece.run->last_ref; ++ref) {
        const Segment& g = list.segments[list.q.refs[ref]];
        const int64_t i = row - g.q_start;
        for (int64_t j = g.first_key(i); j < g.last_key(i); ++j) {
          const int64_t key = g.k_start + j;
          const T* k_row = load_row<T>(a.k, key, head / group, dim, k.data());
          const T* v_row = load_row<T>(a.v, key, head / group, dim, v.data());
          T dropped = 1;
          if (a.options.dropout.probability > 0) {
            dropped = T(DropoutRow(a.options.dropout, row, head).factor(key));
          }
          const T ds = pairs.pair(q_row, k_row, v_row, dout_row, row_lse, row_delta, dropped).ds;
          for (int64_t d = 0; d < dim; ++d) dq[d] += ds * k_row[d];
        }
      }
      if (!a.accumulate || piece.run->first_ref != piece.run->last_ref) {
        store_row<T>(a.dq, row, head, dim, dq.data(), a.accumulate);
      }
    }
  });
}

template <class T>
void backward_kv(const BackwardArgs& a, const SegmentList& list, const Parallel& parallel) {
  const std::vector<Piece> pieces = cut(list.k);
  const int64_t dim = a.shape.dim, group = a.shape.heads / a.shape.kv_heads;
  const BackwardPairs<T> pairs{a};
  parallel(static_cast<int64_t>(pieces.size()) * a.shape.kv_heads, [&](int64_t task) {
    const Piece& piece = pieces[task / a.shape.kv_heads];
    const int64_t kv = task % a.shape.kv_heads;
    std::vector<T> q(dim), k(dim), v(dim), dout(dim), dk(dim), dv(dim);
    for (int64_t key = piece.start; key < piece.start + piece.len; ++key) {
      std::fill(dk.begin(), dk.end(), T(0));
      std::fill(dv.begin(), dv.end(), T(0));
      const T* k_row = load_row<T>(a.k, key, kv, dim, k.data());
      const T* v_row = load_row<T>(a.v, key, kv, dim, v.data());
      for (int32_t ref = piece.run->first_ref; ref < piece.run->last_ref; ++ref) {
        const Segment& g = list.segments[list.k.refs[ref]];
        const int64_t j = key - g.k_start;
        for (int64_t head = kv * group; head < (kv + 1) * group; ++head) {
          for (int64_t i = g.first_row(j); i < g.last_row(j); ++i) {
            const int64_t row = g.q_start + i;
            const T row_lse = pairs.lse(row, head);
            if (row_lse == -std::numeric_limits<T>::infinity()) continue;
            const T* q_row = load_row<T>(a.q, row, head, dim, q.data());
            const T* dout_row = load_row<T>(a.dout, row, head, dim, dout.data());
            T dropped = 1;
            if (a.options.dropout.probability > 0) {
              dropped = T(DropoutRow(a.options.dropout, row, head).factor(key));
            }
            const Pair<T> pair =
                pairs.pair(q_row, k_row, v_row, dout_row, row_lse, pairs.delta(row, head), dropped);
            for (int64_t d = 0; d < dim; ++d) dk[d] += pair.ds * q_row[d];
            for (int64_t d = 0; d < dim; ++d) dv[d] += pair.p_dropped * dout_row[d];
          }
        }
      }
      if (!a.accumulate || piece.run->first_ref != piece.run->last_ref) {
        store_row<T>(a.dk, key, kv, dim, dk.data(), a.accumulate);
        store_row<T>(a.dv, key, kv, dim, dv.data(), a.accumulate);
      }
    }
  });
}

template <class T>
void backward(const BackwardArgs& a, const SegmentList& list, const Parallel& parallel) {
  compute_delta<T>(a, parallel);
  backward_q<T>(a, list, parallel);
  backward_kv<T>(a, list, parallel);
}

}  // namespace

void scalar_forward(const ForwardArgs& args, const SegmentList& list, const Parallel& parallel) {
  if (args.q.dtype == DType::kFloat64) return forward<double>(args, list, parallel);
  forward<float>(args, list, parallel);
}

void scalar_backward(const BackwardArgs& args, const SegmentList& list, const Parallel& parallel) {
  if (args.q.dtype == DType::kFloat64) return backward<double>(args, list, parallel);
  backward<float>(args, list, parallel);
}

}  // namespace mdcp
