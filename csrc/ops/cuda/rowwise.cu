// Row-wise arithmetic: merge of partial attention results, RoPE from positions, cross-entropy.
#include "attention_view.cuh"
#include "numeric.cuh"

namespace mdcp::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;

int64_t blocks_for(int64_t items, int64_t per_block) {
  const int64_t blocks = (items + per_block - 1) / per_block;
  return blocks < kMostBlocks ? blocks : kMostBlocks;
}

template <class T>
MDCP_DEVICE T* row_of(const MdcpRows& rows, int64_t row, int64_t head) {
  return static_cast<T*>(rows.data) + row * rows.row_stride + head * rows.head_stride;
}

template <class A>
MDCP_DEVICE A& stat_of(const MdcpStat& stat, int64_t head, int64_t row) {
  return static_cast<A*>(stat.data)[head * stat.head_stride + row * stat.row_stride];
}

// --- merge: a warp per (row, head) ---------------------------------------------------------------

// Shares of two partial softmaxes and their joint lse; both -inf gives zeros.
template <class A>
struct Shares {
  A a, b, lse;
  MDCP_DEVICE Shares(A x, A y) {
    const A nothing = -infinite<A>(), top = x > y ? x : y;
    a = b = A(0);
    lse = nothing;
    if (x == nothing && y == nothing) return;  // not if one is NaN
    const A p = exponential(x - top), q = exponential(y - top), sum = p + q;
    a = p / sum;
    b = q / sum;
    lse = top + logarithm(sum);
  }
};

struct MergeParams {
  MdcpMerge args;
};

template <class T>
MDCP_KERNEL void MDCP_BOUNDS(kThreads, 1) merge_kernel(const MergeParams p) {
  using A = typename Accumulation<T>::type;
  const MdcpMerge& m = p.args;
  const int lane = thread_index() % kWarp;
  const int64_t items = m.rows * m.heads, step = int64_t(block_count()) * kWarps;
  for (int64_t item = int64_t(block_index()) * kWarps + thread_index() / kWarp; item < items;
       item += step) {
    const int64_t row = item / m.heads, head = item % m.heads;
    const Shares<A> w(stat_of<A>(m.lse_a, head, row), stat_of<A>(m.lse_b, head, row));
    const T *const a = row_of<T>(m.out_a, row, head), *const b = row_of<T>(m.out_b, row, head);
    T* const out = row_of<T>(m.out, row, head);
    for (int d = lane; d < m.dim; d += kWarp) {
      const A x = w.a == 0 ? A(0) : w.a * widen<A>(a[d]);
      const A y = w.b == 0 ? A(0) : w.b * widen<A>(b[d]);
      out[d] = narrow<T>(x + y);
    }
    if (lane == 0) stat_of<A>(m.lse, head, row) = w.lse;
  }
}

struct MergeGradParams {
  MdcpMergeGrad args;
};

template <class T>
MDCP_KERNEL void MDCP_BOUNDS(kThreads, 1) merge_grad_kernel(const MergeGradParams p) {
  using A = typename Accumulation<T>::type;
  const MdcpMerge& m = p.args.forward;
  const int lane = thread_index() % kWarp;
  const int64_t items = m.rows * m.heads, step = int64_t(block_count()) * kWarps;
  for (int64_t item = int64_t(block_index()) * kWarps + thread_index() / kWarp; item < items;
       item += step) {
    const int64_t row = item / m.heads, head = item % m.heads;
    const Shares<A> w(stat_of<A>(m.lse_a, head, row), stat_of<A>(m.lse_b, head, row));
    const T *const a = row_of<T>(m.out_a, row, head), *const b = row_of<T>(m.out_b, row, head);
    const T* const dout = row_of<T>(p.args.dout, row, head);
    T* const da = row_of<T>(p.args.dout_a, row, head);
    T* const db = row_of<T>(p.args.dout_b, row, head);
    A along_a = 0, along_b = 0;
    for (int d = lane; d < m.dim; d += kWarp) {
      const A y = widen<A>(dout[d]);
      if (w.a != 0) along_a += y * widen<A>(a[d]);
      if (w.b != 0) along_b += y * widen<A>(b[d]);
      da[d] = narrow<T>(w.a == 0 ? A(0) : w.a * y);
      db[d] = narrow<T>(w.b == 0 ? A(0) : w.b * y);
    }
    along_a = warp_sum(along_a);
    along_b = warp_sum(along_b);
    if (lane != 0) continue;
    const A both = w.a * along_a + w.b * along_b;
    const A dlse = p.args.dlse.data ? stat_of<A>(p.args.dlse, head, row) : A(0);
    stat_of<A>(p.args.dlse_a, head, row) = w.a == 0 ? A(0) : w.a * (along_a - both + dlse);
    stat_of<A>(p.args.dlse_b, head, row) = w.b == 0 ? A(0) : w.b * (along_b - both + dlse);
  }
}

// --- RoPE: a thread per (token, pair), all heads
// ---------------------------------------------------

struct RopeParams {
  MdcpRope args;
};

template <class T>
MDCP_KERNEL void MDCP_BOUNDS(kThreads, 1) rope_kernel(const RopeParams p) {
  using A = typename Accumulation<T>::type;
  const MdcpRope& r = p.args;
  const int64_t each = r.dim - r.pairs;  // pairs, then dims that are copied
  const int64_t step = r.interleaved ? 2 : 1, other = r.interleaved ? 1 : r.pairs;
  const int64_t items = r.tokens * each, stride = int64_t(block_count()) * kThreads;
  for (int64_t item = int64_t(block_index()) * kThreads + thread_index(); item < items;
       item += stride) {
    const int64_t token = item / each, i = item % each;
    if (i >= r.pairs) {
      for (int64_t h = 0; h < r.heads; ++h)
        row_of<T>(r.out, token, h)[r.pairs + i] = row_of<T>(r.x, token, h)[r.pairs + i];
      continue;
    }
    // In double: a position of a million times a frequency of one leaves float no digits.
    const double angle = double(r.positions[token]) * r.frequencies[i];
    const A cosine = A(cos(angle) * r.scale), sine = A(sin(r.inverse ? -angle : angle) * r.scale);
    for (int64_t h = 0; h < r.heads; ++h) {
      const T* const x = row_of<T>(r.x, token, h);
      T* const out = row_of<T>(r.out, token, h);
      const A a = widen<A>(x[i * step]), b = widen<A>(x[i * step + other]);
      out[i * step] = narrow<T>(a * cosine - b * sine);
      out[i * step + other] = narrow<T>(b * cosine + a * sine);
    }
  }
}

// --- cross-entropy: a block per token ------------------------------------------------------------

constexpr int kChunk = 8;  // logits that a thread takes at once

struct CrossEntropyParams {
  MdcpCrossEntropy args;
};

// What exponents are taken from: 0 while nothing above -inf was seen. NaN is never the maximum, but
// it reaches the sum.
template <class A>
MDCP_DEVICE A base_of(A top) {
  return top == -infinite<A>() ? A(0) : top;
}

// Joins (maximum, sum of exponentials) of all threads; every thread gets the result.
template <class A>
MDCP_DEVICE A block_lse(A top, A sum, A* shared) {
  for (int mask = 16; mask > 0; mask /= 2) {
    const A other_top = shuffle_xor(top, mask), other_sum = shuffle_xor(sum, mask);
    const A high = top > other_top ? top : other_top, base = base_of(high);
    sum = sum * exponential(top - base) + other_sum * exponential(other_top - base);
    top = high;
  }
  const int warp = thread_index() / kWarp;
  block_sync();  // the token before has been read
  if (thread_index() % kWarp == 0) {
    shared[2 * warp] = top;
    shared[2 * warp + 1] = sum;
  }
  block_sync();
  A all_top = -infinite<A>(), all_sum = 0;
  for (int w = 0; w < kWarps; ++w) all_top = shared[2 * w] > all_top ? shared[2 * w] : all_top;
  const A base = base_of(all_top);
  for (int w = 0; w < kWarps; ++w)
    all_sum += shared[2 * w + 1] * exponential(shared[2 * w] - base);
  return base + logarithm(all_sum);
}

template <class T>
MDCP_KERNEL void MDCP_BOUNDS(kThreads, 1) cross_entropy_kernel(const CrossEntropyParams p) {
  using A = typename Accumulation<T>::type;
  MDCP_SHARED_ARRAY(A, shared, 2 * kWarps);
  const MdcpCrossEntropy& c = p.args;
  for (int64_t token = block_index(); token < c.tokens; token += block_count()) {
    const T* const row = static_cast<const T*>(c.logits) + token * c.row_stride;
    A top = -infinite<A>(), sum = 0;
    for (int64_t first = int64_t(thread_index()); first < c.vocab; first += kThreads * kChunk) {
      A x[kChunk], high = top;
      MDCP_UNROLL
      for (int i = 0; i < kChunk; ++i) {
        const int64_t v = first + i * kThreads;
        x[i] = v < c.vocab ? widen<A>(row[v]) : -infinite<A>();
        high = x[i] > high ? x[i] : high;
      }
      const A base = base_of(high);
      sum *= exponential(top - base);
      MDCP_UNROLL
      for (int i = 0; i < kChunk; ++i) sum += exponential(x[i] - base);
      top = high;
    }
    const A lse = block_lse(top, sum, shared);
    if (thread_index() != 0) continue;
    const int64_t label = c.labels[token];
    trap_unless(label < c.vocab);
    const A weight = c.weights ? static_cast<const A*>(c.weights)[token] : A(1);
    static_cast<A*>(c.lse)[token] = lse;
    c.losses[token] =
        label < 0 || weight == 0 ? 0.0 : double(weight * (lse - widen<A>(row[label])));
  }
}

// One block, so that the order of the sum depends on the number of tokens alone.
template <class T>
MDCP_KERNEL void MDCP_BOUNDS(kThreads, 1) loss_sum_kernel(const CrossEntropyParams p) {
  MDCP_SHARED_ARRAY(double, sums, kThreads);
  const int t = thread_index();
  double sum = 0;
  for (int64_t token = t; token < p.args.tokens; token += kThreads) sum += p.args.losses[token];
  sums[t] = sum;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    block_sync();  // the level below is complete
    if (t < half) sums[t] += sums[t + half];
  }
  if (t == 0)
    *static_cast<typename Accumulation<T>::type*>(p.args.loss) =
        static_cast<typename Accumulation<T>::type>(sums[0]);
}

struct CrossEntropyGradParams {
  MdcpCrossEntropyGrad args;
};

template <class T>
MDCP_KERNEL void MDCP_BOUNDS(kThreads, 1)
    cross_entropy_grad_kernel(const CrossEntropyGradParams p) {
  using A = typename Accumulation<T>::type;
  const MdcpCrossEntropy& c = p.args.forward;
  const A dloss = *static_cast<const A*>(p.args.dloss);
  for (int64_t token = block_index(); token < c.tokens; token += block_count()) {
    const T* const row = static_cast<const T*>(c.logits) + token * c.row_stride;
    T* const out = static_cast<T*>(p.args.dlogits) + token * c.vocab;
    const int64_t label = c.labels[token];
    const A weight = c.weights ? static_cast<const A*>(c.weights)[token] : A(1);
    const A target = label < 0 ? A(0) : dloss * weight;
    const A factor = target + (p.args.dlse ? static_cast<const A*>(p.args.dlse)[token] : A(0));
    const A lse = static_cast<const A*>(c.lse)[token];
    const bool silent = target == 0 && factor == 0;
    for (int64_t v = thread_index(); v < c.vocab; v += kThreads) {
      A g = silent ? A(0) : exponential(widen<A>(row[v]) - lse) * factor;
      if (v == label) g -= target;
      out[v] = narrow<T>(g);
    }
  }
}

}  // namespace
}  // namespace mdcp::cuda

using namespace mdcp::cuda;

int mdcp_cuda_merge_lse(const MdcpMerge* args, void* stream) {
  return by_dtype(int(args->out_a.dtype), [&](auto zero) {
    return launch(&merge_kernel<decltype(zero)>, MergeParams{*args},
                  blocks_for(args->rows * args->heads, kWarps), kThreads, 0, stream);
  });
}

int mdcp_cuda_merge_lse_grad(const MdcpMergeGrad* args, void* stream) {
  return by_dtype(int(args->forward.out_a.dtype), [&](auto zero) {
    return launch(&merge_grad_kernel<decltype(zero)>, MergeGradParams{*args},
                  blocks_for(args->forward.rows * args->forward.heads, kWarps), kThreads, 0,
                  stream);
  });
}

int mdcp_cuda_rope(const MdcpRope* args, void* stream) {
  if (args->pairs < 0 || 2 * args->pairs > args->dim) return MDCP_CUDA_BAD_ARGUMENT;
  return by_dtype(int(args->x.dtype), [&](auto zero) {
    return launch(&rope_kernel<decltype(zero)>, RopeParams{*args},
                  blocks_for(args->tokens * (args->dim - args->pairs), kThreads), kThreads, 0,
                  stream);
  });
}

int mdcp_cuda_cross_entropy(const MdcpCrossEntropy* args, void* stream) {
  if (args->vocab < 1) return MDCP_CUDA_BAD_ARGUMENT;
  return by_dtype(int(args->dtype), [&](auto zero) {
    using T = decltype(zero);
    const CrossEntropyParams params{*args};
    if (const int error = launch(&cross_entropy_kernel<T>, params, blocks_for(args->tokens, 1),
                                 kThreads, 0, stream))
      return error;
    return launch(&loss_sum_kernel<T>, params, 1, kThreads, 0, stream);
  });
}

int mdcp_cuda_cross_entropy_grad(const MdcpCrossEntropyGrad* args, void* stream) {
  if (args->forward.vocab < 1) return MDCP_CUDA_BAD_ARGUMENT;
  return by_dtype(int(args->forward.dtype), [&](auto zero) {
    return launch(&cross_entropy_grad_kernel<decltype(zero)>, CrossEntropyGradParams{*args},
                  blocks_for(args->forward.tokens, 1), kThreads, 0, stream);
  });
}
