// Pieces shared by the tensor-core kernels: shared-memory tiles, fragments, stores.
//
// A tile in shared memory is [rows][D + 8] elements of 16 bits: the 8 elements of padding put the
// eight rows that one ldmatrix phase reads into different banks for every D that is a multiple
// of 16. Fragment words, for lane l, g = l / 4, p = 2 * (l % 4):
//   accumulator (16x8): c[0..1] row g, columns p, p + 1; c[2..3] row g + 8
//   A (16x16): a0 (row g, k p), a1 (row g + 8, k p), a2 (row g, k p + 8), a3 (row g + 8, k p + 8)
// so two neighbouring accumulators, rounded to 16 bits, are an A fragment: what comes out of one
// product goes into the next without leaving registers.
#pragma once

#include "attention_view.cuh"
#include "plan.cuh"
#include "simt.cuh"

namespace mdcp::cuda {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

MDCP_DEVICE float infinity() { return __builtin_huge_valf(); }

// tanh to about 1e-7 absolute, without the branches of tanhf: it is evaluated for every score.
MDCP_DEVICE float tanh_approx(float x) {
  return 1.f - 2.f * reciprocal_approx(exp2_approx(2.f * kLog2e * x) + 1.f);
}

template <int D>
constexpr int tile_stride = D + 8;

// Starts copying `count` rows, zeros up to ROWS rows and from column head_dim to D. A thread keeps
// one chunk of 16 bytes and steps down the rows, so that one address is live, not one per row.
template <class T, int ROWS, int D, int THREADS>
MDCP_DEVICE void load_tile(T* tile, const MdcpRows& rows, int64_t row, int head, int count,
                           int head_dim) {
  constexpr int lanes = D <= 64 ? 8 : D <= 128 ? 16 : 32, step = THREADS / lanes;
  static_assert(ROWS % step == 0);
  const int thread = fresh_thread_index(), first = thread / lanes, column = thread % lanes * 8;
  if (column >= D) return;
  const T* const base = row_pointer<T>(rows, row, head);
  const T* source = base + int64_t(first) * rows.row_stride + column;
  T* target = tile + first * tile_stride<D> + column;
  MDCP_UNROLL
  for (int r = 0; r < ROWS; r += step) {
    const bool valid = first + r < count && column < head_dim;
    copy_async_16(target + r * tile_stride<D>, valid ? source : base, valid);
    source += step * rows.row_stride;
  }
}

// A fragment: rows [row, row + 16), columns [k, k + 16) of a tile.
template <class T, int D>
MDCP_DEVICE void load_a(uint32_t (&a)[4], const T* tile, int row, int k) {
  const int lane = thread_index() % kWarp;
  load_matrix_x4(a, tile + (row + lane % 16) * tile_stride<D> + k + lane / 16 * 8);
}

// B fragments (b[0], b[1]) and (b[2], b[3]) of two n-tiles, where the tile holds B transposed: its
// rows [n, n + 16) are columns of B, its columns [k, k + 16) the summed index.
template <class T, int D>
MDCP_DEVICE void load_b_rows(uint32_t (&b)[4], const T* tile, int n, int k) {
  const int lane = thread_index() % kWarp;
  load_matrix_x4(b, tile + (n + lane / 16 * 8 + lane % 8) * tile_stride<D> + k + lane / 8 % 2 * 8);
}

// The same where the tile holds B as it is: its rows [k, k + 16) are the summed index.
template <class T, int D>
MDCP_DEVICE void load_b_columns(uint32_t (&b)[4], const T* tile, int k, int n) {
  const int lane = thread_index() % kWarp;
  load_matrix_x4_transposed(b, tile + (k + lane % 16) * tile_stride<D> + n + lane / 16 * 8);
}

// c (16 x N) += rows [row, row + 16) of `left` times the transpose of the first N rows of `right`.
template <class T, int D, int N>
MDCP_DEVICE void multiply_rows(float (&c)[N / 8][4], const T* left, int row, const T* right) {
  MDCP_UNROLL
  for (int k = 0; k < D; k += 16) {
    uint32_t a[4];
    load_a<T, D>(a, left, row, k);
    MDCP_UNROLL
    for (int n = 0; n < N; n += 16) {
      uint32_t b[4];
      load_b_rows<T, D>(b, right, n, k);
      mma_16x8x16(c[n / 8], a, b[0], b[1], T());
      mma_16x8x16(c[n / 8 + 1], a, b[2], b[3], T());
    }
  }
}

template <class T>
MDCP_DEVICE void to_a(uint32_t (&a)[4], const float (&c0)[4], const float (&c1)[4]) {
  a[0] = pack2<T>(c0[0], c0[1]);
  a[1] = pack2<T>(c0[2], c0[3]);
  a[2] = pack2<T>(c1[0], c1[1]);
  a[3] = pack2<T>(c1[2], c1[3]);
}

// c (16 x COLUMNS) += p (16 x K, registers) times rows [0, K) of columns [first, first + COLUMNS)
// of `right`.
template <class T, int D, int K, int COLUMNS>
MDCP_DEVICE void multiply_registers(float (&c)[COLUMNS / 8][4], const float (&p)[K / 8][4],
                                    const T* right, int first) {
  MDCP_UNROLL
  for (int k = 0; k < K; k += 16) {
    uint32_t a[4];
    to_a<T>(a, p[k / 8], p[k / 8 + 1]);
    MDCP_UNROLL
    for (int n = 0; n < COLUMNS; n += 16) {
      uint32_t b[4];
      load_b_columns<T, D>(b, right, k, first + n);
      mma_16x8x16(c[n / 8], a, b[0], b[1], T());
      mma_16x8x16(c[n / 8 + 1], a, b[2], b[3], T());
    }
  }
}

template <int N>
MDCP_DEVICE void clear(float (&c)[N][4]) {
  MDCP_UNROLL
  for (int n = 0; n < N; ++n) {
    MDCP_UNROLL
    for (int e = 0; e < 4; ++e) c[n][e] = 0.f;
  }
}

// Writes two neighbouring columns, in the dtype of the target.
template <class T>
MDCP_DEVICE void store_pair(const MdcpRows& rows, int64_t row, int64_t head, int column, float x,
                            float y, bool accumulate) {
  const int64_t offset = row * rows.row_stride + head * rows.head_stride + column;
  if (rows.dtype == MDCP_F32) {
    float* const at = static_cast<float*>(rows.data) + offset;
    at[0] = accumulate ? at[0] + x : x;
    at[1] = accumulate ? at[1] + y : y;
  } else {
    T* const at = static_cast<T*>(rows.data) + offset;
    *reinterpret_cast<uint32_t*>(at) = pack2<T>(x, y);
  }
}

}  // namespace mdcp::cuda
