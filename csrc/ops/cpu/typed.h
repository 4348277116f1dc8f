// Element types of the memory-bound ops: storage in 16, 32 or 64 bits, arithmetic in float or
// double.
#pragma once

#include <cstdint>

#include "convert.h"

namespace mdcp {

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

template <class E>
struct Element {  // float and double: their own arithmetic type
  using Acc = E;
  static Acc load(E x) { return x; }
  static E store(Acc x) { return x; }
};
template <>
struct Element<BFloat16> {
  using Acc = float;
  static float load(BFloat16 x) { return bf16_to_float(x.bits); }
  static BFloat16 store(float x) { return {float_to_bf16(x)}; }
};
template <>
struct Element<Half> {
  using Acc = float;
  static float load(Half x) { return half_to_float(x.bits); }
  static Half store(float x) { return {float_to_half(x)}; }
};

// Calls f with a value of the element type of `dtype`.
template <class F>
auto with_element(DType dtype, const F& f) {
  switch (dtype) {
    case DType::kFloat64:
      return f(double{});
    case DType::kFloat32:
      return f(float{});
    case DType::kBFloat16:
      return f(BFloat16{});
    default:
      return f(Half{});
  }
}

}  // namespace mdcp
