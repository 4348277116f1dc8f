// Fragment layouts follow the PTX ISA: "mma.m16n8k16 with floating point type" and "ldmatrix".
// Products are exact in float and are summed in float in order of k; a tensor core's order and
// internal width differ, which changes last bits only.
#include "collectives.h"

namespace mdcp::cuda::emulate {
namespace {

void shuffle(Operand* const (&lanes)[kWarp]) {
  uint64_t values[kWarp];
  for (int i = 0; i < kWarp; ++i) values[i] = lanes[i]->value;
  for (int i = 0; i < kWarp; ++i) lanes[i]->value = values[lanes[i]->source % kWarp];
}

// Lane l, register m holds elements 2 * (l % 4) and the next of row l / 4 of matrix m; transposed,
// of column l / 4.
void load_matrices(Operand* const (&lanes)[kWarp], bool transposed) {
  for (int m = 0; m < 4; ++m) {
    uint16_t matrix[8][8];
    for (int row = 0; row < 8; ++row) std::memcpy(matrix[row], lanes[m * 8 + row]->address, 16);
    for (int lane = 0; lane < kWarp; ++lane) {
      const int major = lane / 4, minor = 2 * (lane % 4);
      const uint16_t low = transposed ? matrix[minor][major] : matrix[major][minor];
      const uint16_t high = transposed ? matrix[minor + 1][major] : matrix[major][minor + 1];
      lanes[lane]->words[m] = uint32_t(low) | (uint32_t(high) << 16);
    }
  }
}

template <float (*Decode)(uint16_t)>
void multiply(Operand* const (&lanes)[kWarp]) {
  float a[16][16], b[16][8];
  for (int lane = 0; lane < kWarp; ++lane) {
    const int group = lane / 4, pair = 2 * (lane % 4);
    const uint32_t* words = lanes[lane]->words;
    for (int r = 0; r < 6; ++r) {
      const float low = Decode(uint16_t(words[r])), high = Decode(uint16_t(words[r] >> 16));
      if (r < 4) {
        float* const row = a[group + 8 * (r & 1)] + pair + 8 * (r >> 1);
        row[0] = low;
        row[1] = high;
      } else {
        b[pair + 8 * (r - 4)][group] = low;
        b[pair + 8 * (r - 4) + 1][group] = high;
      }
    }
  }
  for (int lane = 0; lane < kWarp; ++lane) {
    const int group = lane / 4, pair = 2 * (lane % 4);
    for (int r = 0; r < 4; ++r) {
      const float* row = a[group + 8 * (r >> 1)];
      const int column = pair + (r & 1);
      float sum = lanes[lane]->accumulators[r];
      for (int k = 0; k < 16; ++k) sum += row[k] * b[k][column];
      lanes[lane]->accumulators[r] = sum;
    }
  }
}

}  // namespace

void execute(Operation operation, Operand* const (&lanes)[kWarp]) {
  switch (operation) {
    case Operation::sync:
      return;
    case Operation::shuffle:
      return shuffle(lanes);
    case Operation::matrix:
      return load_matrices(lanes, false);
    case Operation::matrix_transposed:
      return load_matrices(lanes, true);
    case Operation::mma_bf16:
      return multiply<bf16_to_float>(lanes);
    case Operation::mma_fp16:
      return multiply<fp16_to_float>(lanes);
  }
}

}  // namespace mdcp::cuda::emulate
