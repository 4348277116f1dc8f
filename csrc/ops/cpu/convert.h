// Storage <-> accumulation conversions, one row at a time, and the counter-based random words.
#pragma once

#include <cstdint>
#include <cstring>

#include "attention.h"

namespace mdcp {

inline float bf16_to_float(uint16_t x) {
  uint32_t u = static_cast<uint32_t>(x) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

inline uint16_t float_to_bf16(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((u >> 16) | 0x40u);  // NaN
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

inline float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  uint32_t exponent = (h >> 10) & 0x1fu, mantissa = h & 0x3ffu, u;
  if (exponent == 0x1f) {
    u = sign | 0x7f800000u | (mantissa << 13);
  } else if (exponent != 0) {
    u = sign | ((exponent + 112) << 23) | (mantissa << 13);
  } else {
    float f = static_cast<float>(mantissa) * 5.9604644775390625e-8f;  // 2^-24
    std::memcpy(&u, &f, 4);
    u |= sign;
  }
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

inline uint16_t float_to_half(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  const uint16_t sign = static_cast<uint16_t>((u >> 16) & 0x8000u);
  u &= 0x7fffffffu;
  if (u > 0x7f800000u) return sign | 0x7e00u;   // NaN
  if (u >= 0x477ff000u) return sign | 0x7c00u;  // rounds to infinity
  if (u < 0x38800000u) {                        // subnormal: adding 0.5 rounds at 2^-24
    float a;
    std::memcpy(&a, &u, 4);
    a += 0.5f;
    std::memcpy(&u, &a, 4);
    return sign | static_cast<uint16_t>(u - 0x3f000000u);
  }
  u += 0xc8000fffu + ((u >> 13) & 1u);
  return sign | static_cast<uint16_t>(u >> 13);
}

// A row of n elements in the accumulation type: the storage itself when the types agree.
template <class T>
const T* load_row(const Rows& rows, int64_t row, int64_t head, int64_t n, T* scratch) {
  const void* p = rows.at(row, head);
  switch (rows.dtype) {
    case DType::kFloat64:
      if constexpr (sizeof(T) == 8) return static_cast<const T*>(p);
      for (int64_t i = 0; i < n; ++i) scratch[i] = static_cast<T>(static_cast<const double*>(p)[i]);
      break;
    case DType::kFloat32:
      if constexpr (sizeof(T) == 4) return static_cast<const T*>(p);
      for (int64_t i = 0; i < n; ++i) scratch[i] = static_cast<const float*>(p)[i];
      break;
    case DType::kBFloat16:
      for (int64_t i = 0; i < n; ++i)
        scratch[i] = bf16_to_float(static_cast<const uint16_t*>(p)[i]);
      break;
    case DType::kFloat16:
      for (int64_t i = 0; i < n; ++i)
        scratch[i] = half_to_float(static_cast<const uint16_t*>(p)[i]);
      break;
  }
  return scratch;
}

// Writes (or, with add, accumulates into) a row.
template <class T>
void store_row(const Rows& rows, int64_t row, int64_t head, int64_t n, const T* values, bool add) {
  void* p = rows.at(row, head);
  switch (rows.dtype) {
    case DType::kFloat64: {
      double* d = static_cast<double*>(p);
      for (int64_t i = 0; i < n; ++i) d[i] = add ? d[i] + values[i] : values[i];
      break;
    }
    case DType::kFloat32: {
      float* d = static_cast<float*>(p);
      for (int64_t i = 0; i < n; ++i) {
        const float x = static_cast<float>(values[i]);
        d[i] = add ? d[i] + x : x;
      }
      break;
    }
    case DType::kBFloat16: {
      uint16_t* d = static_cast<uint16_t*>(p);
      for (int64_t i = 0; i < n; ++i) d[i] = float_to_bf16(static_cast<float>(values[i]));
      break;
    }
    case DType::kFloat16: {
      uint16_t* d = static_cast<uint16_t*>(p);
      for (int64_t i = 0; i < n; ++i) d[i] = float_to_half(static_cast<float>(values[i]));
      break;
    }
  }
}

// Philox4x32-10 (Salmon et al., SC'11): four random words of a 128-bit counter and a 64-bit key.
inline void philox(const uint32_t counter[4], uint32_t k0, uint32_t k1, uint32_t out[4]) {
  uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = 0xD2511F53ull * c0, b = 0xCD9E8D57ull * c2;
    const uint32_t n0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
    const uint32_t n2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(b);
    c3 = static_cast<uint32_t>(a);
    c0 = n0;
    c2 = n2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  out[0] = c0;
  out[1] = c1;
  out[2] = c2;
  out[3] = c3;
}

// Dropout masks of one (q row, head): factor(k row) is 0 or 1 / (1 - p).
class DropoutRow {
 public:
  DropoutRow(const Dropout& d, int64_t q_row, int64_t head)
      : positions_(d.k_positions),
        threshold_(static_cast<uint64_t>(d.probability * 4294967296.0)),
        keep_(1.0 / (1.0 - d.probability)) {
    const uint64_t sample = static_cast<uint64_t>(d.sample_ids[q_row]);
    counter_[1] = static_cast<uint32_t>(d.q_positions[q_row]);
    counter_[2] = static_cast<uint32_t>(head + d.head_offset);
    counter_[3] = static_cast<uint32_t>(sample);
    key0_ = static_cast<uint32_t>(d.key);
    key1_ = static_cast<uint32_t>(d.key >> 32) ^ static_cast<uint32_t>(sample >> 32);
  }

  double factor(int64_t k_row) {
    const uint64_t position = static_cast<uint64_t>(positions_[k_row]);
    const uint32_t group = static_cast<uint32_t>(position >> 2);
    if (!valid_ || group != counter_[0]) {
      counter_[0] = group;
      philox(counter_, key0_, key1_, words_);
      valid_ = true;
    }
    return words_[position & 3] >= threshold_ ? keep_ : 0.0;
  }

 private:
  const int64_t* positions_;
  uint64_t threshold_;
  double keep_;
  uint32_t counter_[4] = {0, 0, 0, 0};
  uint32_t key0_, key1_;
  uint32_t words_[4] = {0, 0, 0, 0};
  bool valid_ = false;
};

}  // namespace mdcp
