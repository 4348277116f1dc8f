// rowsum(dout * out) - dlse, the term that the attention backward subtracts from a row's gradients.
#pragma once

#include "plan.h"
#include "tiles.h"

namespace mdcp {

inline float* delta_at(const BackwardArgs& a, int64_t row, int64_t head) {
  return static_cast<float*>(a.delta.data) + head * a.delta.head_stride + row * a.delta.row_stride;
}

// rowsum(dout * out) - dlse. `spare` holds 2 * round_up(dim, W) floats. Inlined: a call for each
// row is felt on short sequences.
template <class T>
[[gnu::always_inline]] inline float row_delta(const BackwardArgs& a, int64_t row, int64_t head,
                                              float* spare) {
  using S = typename T::S;
  constexpr int W = S::W;
  const int64_t dim = a.shape.dim, wide = round_up(dim, W);
  const void *x = a.out.at(row, head), *y = a.dout.at(row, head);
  typename S::V total = S::zero();
  int64_t d = 0;
  for (; d + W <= dim; d += W) {
    total = S::fma(T::load_vector(a.out.dtype, x, d), T::load_vector(a.dout.dtype, y, d), total);
  }
  if (d < dim) {
    S::store(spare + wide - W, S::zero());
    S::store(spare + 2 * wide - W, S::zero());
    T::load_floats(spare, a.out, row, head, dim);
    T::load_floats(spare + wide, a.dout, row, head, dim);
    total = S::fma(S::load(spare + d), S::load(spare + wide + d), total);
  }
  const float* dlse = static_cast<const float*>(a.dlse.data);
  const float own = dlse ? dlse[head * a.dlse.head_stride + row * a.dlse.row_stride] : 0.0f;
  return S::sum(total) - own;
}

// Deltas of the q pieces that several tasks visit. Where one does, it takes them on its way: a pass
// of its own reads dout and out from memory once more.
template <class T>
void all_deltas(const BackwardArgs& a, const BackwardPlan& plan, const Parallel& parallel) {
  parallel(static_cast<int64_t>(plan.q_pieces.size()), [&](int64_t i) {
    if (plan.visits[i] < 2) return;
    const Piece& piece = plan.q_pieces[i];
    float* spare = scratch_floats(2 * round_up(a.shape.dim, T::W));
    for (int64_t row = piece.start; row < piece.start + piece.len; ++row) {
      for (int64_t h = 0; h < a.shape.heads; ++h)
        *delta_at(a, row, h) = row_delta<T>(a, row, h, spare);
    }
  });
}

}  // namespace mdcp
