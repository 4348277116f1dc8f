// Row-wise arithmetic: merge of partial attention results, RoPE, cross-entropy.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "memory_bound.h"
#include "typed.h"

// Plain loops, compiled for the wider machines as well and chosen when the library is loaded. No
// contraction of a * b + c, so all versions give the same bits.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__gnu_linux__)
#define MDCP_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define MDCP_CLONES
#endif

namespace mdcp {
namespace {

template <class A>
A& stat(const Stat& s, int64_t head, int64_t row) {
  return static_cast<A*>(s.data)[head * s.head_stride + row * s.row_stride];
}

// Weights of the two partial results and their joint lse; both -inf gives zeros.
template <class A>
struct Weights {
  A a, b, lse;
  Weights(A x, A y) {
    const A top = std::max(x, y), infinity = std::numeric_limits<A>::infinity();
    if (x == -infinity && y == -infinity) {  // not if one is NaN
      a = b = 0;
      lse = -infinity;
      return;
    }
    const A p = std::exp(x - top), q = std::exp(y - top), sum = p + q;
    a = p / sum;
    b = q / sum;
    lse = top + std::log(sum);
  }
};

// e^x for x <= 0 in plain arithmetic that the compiler can vectorize; 0 below -87.
inline float exp_negative(float x) {
  x = x < -87.3f ? -87.3f : x;
  const float t = x * 1.44269504088896341f;
  const float n = (t + 12582912.0f) - 12582912.0f;              // round to nearest: 1.5 * 2^23
  const float f = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // Cody and Waite's split of ln 2
  float p = 1.0f / 5040;
  p = p * f + 1.0f / 720;
  p = p * f + 1.0f / 120;
  p = p * f + 1.0f / 24;
  p = p * f + 1.0f / 6;
  p = p * f + 0.5f;
  p = p * f + 1.0f;
  p = p * f + 1.0f;
  const int32_t e = (static_cast<int32_t>(n) + 127) << 23;
  float power;
  std::memcpy(&power, &e, 4);
  return x <= -87.3f ? 0.0f : p * power;
}

MDCP_CLONES float highest_float(const float* x, int64_t n) {
  float lanes[16];
  for (float& l : lanes) l = -std::numeric_limits<float>::infinity();
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    for (int c = 0; c < 16; ++c) lanes[c] = x[i + c] > lanes[c] ? x[i + c] : lanes[c];
  }
  for (; i < n; ++i) lanes[0] = x[i] > lanes[0] ? x[i] : lanes[0];
  return *std::max_element(lanes, lanes + 16);
}

// Sum of e^(x - top), 16 fixed lanes.
MDCP_CLONES float exp_sum_float(const float* x, int64_t n, float top) {
  float lanes[16] = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    for (int c = 0; c < 16; ++c) lanes[c] += exp_negative(x[i + c] - top);
  }
  for (; i < n; ++i) lanes[0] += exp_negative(x[i] - top);
  float sum = 0;
  for (float l : lanes) sum += l;
  return sum;
}

MDCP_CLONES void softmax_float(float* out, const float* x, int64_t n, float lse, float factor) {
  for (int64_t i = 0; i < n; ++i) {
    const float y = x[i] - lse;
    out[i] = exp_negative(y > 0 ? 0.0f : y) * factor;
  }
}

inline float highest(const float* x, int64_t n) { return highest_float(x, n); }
inline double highest(const double* x, int64_t n) { return *std::max_element(x, x + n); }
inline float exp_sum(const float* x, int64_t n, float top) { return exp_sum_float(x, n, top); }
inline double exp_sum(const double* x, int64_t n, double top) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += std::exp(x[i] - top);
  return sum;
}
inline void softmax(float* out, const float* x, int64_t n, float lse, float factor) {
  softmax_float(out, x, n, lse, factor);
}
inline void softmax(double* out, const double* x, int64_t n, double lse, double factor) {
  for (int64_t i = 0; i < n; ++i) out[i] = std::exp(x[i] - lse) * factor;
}

constexpr int64_t kVocabChunk = 2048;

// A chunk of logits in the accumulation type: the storage itself, or converted into `spare`.
template <class E>
const typename Element<E>::Acc* widen(const E* x, int64_t n, typename Element<E>::Acc* spare) {
  if constexpr (std::is_same_v<E, typename Element<E>::Acc>) {
    return x;
  } else {
    for (int64_t i = 0; i < n; ++i) spare[i] = Element<E>::load(x[i]);
    return spare;
  }
}

}  // namespace

void merge_lse(const MergeArgs& m, const Parallel& parallel) {
  const int64_t dim = m.shape.dim;
  with_element(m.out.dtype, [&](auto tag) {
    using E = decltype(tag);
    using A = typename Element<E>::Acc;
    parallel(m.shape.total_q, [&](int64_t row) {
      for (int64_t h = 0; h < m.shape.heads; ++h) {
        const Weights<A> w(stat<A>(m.lse_a, h, row), stat<A>(m.lse_b, h, row));
        const E* a = static_cast<const E*>(m.out_a.at(row, h));
        const E* b = static_cast<const E*>(m.out_b.at(row, h));
        E* out = static_cast<E*>(m.out.at(row, h));
        for (int64_t d = 0; d < dim; ++d) {
          const A x = w.a == 0 ? A(0) : w.a * Element<E>::load(a[d]);
          const A y = w.b == 0 ? A(0) : w.b * Element<E>::load(b[d]);
          out[d] = Element<E>::store(x + y);
        }
        stat<A>(m.lse, h, row) = w.lse;
      }
    });
  });
}

void merge_lse_grad(const MergeGradArgs& g, const Parallel& parallel) {
  const MergeArgs& m = g.forward;
  const int64_t dim = m.shape.dim;
  with_element(m.out_a.dtype, [&](auto tag) {
    using E = decltype(tag);
    using A = typename Element<E>::Acc;
    parallel(m.shape.total_q, [&](int64_t row) {
      for (int64_t h = 0; h < m.shape.heads; ++h) {
        const Weights<A> w(stat<A>(m.lse_a, h, row), stat<A>(m.lse_b, h, row));
        const E* a = static_cast<const E*>(m.out_a.at(row, h));
        const E* b = static_cast<const E*>(m.out_b.at(row, h));
        const E* dout = static_cast<const E*>(g.dout.at(row, h));
        E* da = static_cast<E*>(g.dout_a.at(row, h));
        E* db = static_cast<E*>(g.dout_b.at(row, h));
        A along_a = 0, along_b = 0;  // dout . out_a and dout . out_b
        for (int64_t d = 0; d < dim; ++d) {
          const A y = Element<E>::load(dout[d]);
          if (w.a != 0) along_a += y * Element<E>::load(a[d]);
          if (w.b != 0) along_b += y * Element<E>::load(b[d]);
          da[d] = Element<E>::store(w.a == 0 ? A(0) : w.a * y);
          db[d] = Element<E>::store(w.b == 0 ? A(0) : w.b * y);
        }
        const A both = w.a * along_a + w.b * along_b;
        const A dlse = g.dlse.data ? stat<A>(g.dlse, h, row) : A(0);
        stat<A>(g.dlse_a, h, row) = w.a == 0 ? A(0) : w.a * (along_a - both + dlse);
        stat<A>(g.dlse_b, h, row) = w.b == 0 ? A(0) : w.b * (along_b - both + dlse);
      }
    });
  });
}

void rope(const RopeArgs& r, const Parallel& parallel) {
  with_element(r.x.dtype, [&](auto tag) {
    using E = decltype(tag);
    using A = typename Element<E>::Acc;
    constexpr int64_t kBlock = 16;
    parallel((r.tokens + kBlock - 1) / kBlock, [&](int64_t block) {
      std::vector<A> angles(2 * r.pairs);
      A *cosine = angles.data(), *sine = cosine + r.pairs;
      for (int64_t t = block * kBlock; t < std::min(r.tokens, (block + 1) * kBlock); ++t) {
        for (int64_t i = 0; i < r.pairs; ++i) {
          const double angle = static_cast<double>(r.positions[t]) * r.frequencies[i];
          cosine[i] = static_cast<A>(std::cos(angle) * r.scale);
          sine[i] = static_cast<A>(std::sin(r.inverse ? -angle : angle) * r.scale);
        }
        // Pair i is (i, i + pairs), or interleaved (2 i, 2 i + 1).
        const int64_t step = r.interleaved ? 2 : 1, other = r.interleaved ? 1 : r.pairs;
        for (int64_t h = 0; h < r.heads; ++h) {
          const E* x = static_cast<const E*>(r.x.at(t, h));
          E* out = static_cast<E*>(r.out.at(t, h));
          for (int64_t i = 0; i < r.pairs; ++i) {
            const A a = Element<E>::load(x[i * step]), b = Element<E>::load(x[i * step + other]);
            out[i * step] = Element<E>::store(a * cosine[i] - b * sine[i]);
            out[i * step + other] = Element<E>::store(b * cosine[i] + a * sine[i]);
          }
          for (int64_t d = 2 * r.pairs; d < r.dim; ++d) out[d] = x[d];
        }
      }
    });
  });
}

void cross_entropy(const CrossEntropyArgs& c, const Parallel& parallel) {
  with_element(c.dtype, [&](auto tag) {
    using E = decltype(tag);
    using A = typename Element<E>::Acc;
    parallel(c.tokens, [&](int64_t t) {
      const E* row = static_cast<const E*>(c.logits) + t * c.row_stride;
      A spare[kVocabChunk], top = -std::numeric_limits<A>::infinity(), sum = 0;
      for (int64_t v = 0; v < c.vocab; v += kVocabChunk) {
        const int64_t n = std::min(kVocabChunk, c.vocab - v);
        const A* x = widen(row + v, n, spare);
        const A now = std::max(top, highest(x, n));
        // NaN is never the maximum, but it reaches the sum.
        const A base = now == -std::numeric_limits<A>::infinity() ? A(0) : now;
        sum = sum * std::exp(top - base) + exp_sum(x, n, base);
        top = now;
      }
      const A lse = top + std::log(sum);
      static_cast<A*>(c.lse)[t] = lse;
      const int64_t label = c.labels[t];
      const A weight = c.weights ? static_cast<const A*>(c.weights)[t] : A(1);
      c.losses[t] = label < 0 || weight == 0
                        ? 0.0
                        : static_cast<double>(weight * (lse - Element<E>::load(row[label])));
    });
  });
}

void cross_entropy_grad(const CrossEntropyArgs& c, double dloss, const void* dlse, void* dlogits,
                        const Parallel& parallel) {
  with_element(c.dtype, [&](auto tag) {
    using E = decltype(tag);
    using A = typename Element<E>::Acc;
    parallel(c.tokens, [&](int64_t t) {
      const E* row = static_cast<const E*>(c.logits) + t * c.row_stride;
      E* out = static_cast<E*>(dlogits) + t * c.vocab;
      const int64_t label = c.labels[t];
      const A weight = c.weights ? static_cast<const A*>(c.weights)[t] : A(1);
      const A target = label < 0 ? A(0) : static_cast<A>(dloss) * weight;
      const A factor = target + (dlse ? static_cast<const A*>(dlse)[t] : A(0));
      if (target == 0 && factor == 0) {
        std::fill(out, out + c.vocab, Element<E>::store(0));
        return;
      }
      A spare[kVocabChunk], p[kVocabChunk];
      const A lse = static_cast<const A*>(c.lse)[t];
      for (int64_t v = 0; v < c.vocab; v += kVocabChunk) {
        const int64_t n = std::min(kVocabChunk, c.vocab - v);
        softmax(p, widen(row + v, n, spare), n, lse, factor);
        if (label >= v && label < v + n) p[label - v] -= target;
        for (int64_t i = 0; i < n; ++i) out[v + i] = Element<E>::store(p[i]);
      }
    });
  });
}

}  // namespace mdcp
