// Arithmetic in the accumulation type: float, and double for double.
#pragma once

#include <cmath>

#include "api.h"
#include "simt.cuh"

namespace mdcp::cuda {

template <class T>
struct Accumulation {
  using type = float;
};
template <>
struct Accumulation<double> {
  using type = double;
};

// Storage -> accumulation and back.
template <class A, class T>
MDCP_DEVICE A widen(T x) {
  return to_float(x);
}
template <>
MDCP_DEVICE double widen<double, double>(double x) {
  return x;
}

MDCP_DEVICE float exponential(float x) { return expf(x); }
MDCP_DEVICE double exponential(double x) { return exp(x); }
MDCP_DEVICE float logarithm(float x) { return logf(x); }
MDCP_DEVICE double logarithm(double x) { return log(x); }
MDCP_DEVICE float hyperbolic(float x) { return tanhf(x); }
MDCP_DEVICE double hyperbolic(double x) { return tanh(x); }

template <class A>
MDCP_DEVICE A infinite() {
  return A(__builtin_huge_val());
}

template <class A>
MDCP_DEVICE A warp_sum(A x) {
  for (int mask = 16; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
  return x;
}
// NaN if any is NaN, on every lane alike: lanes that disagreed would part.
template <class A>
MDCP_DEVICE A warp_max(A x) {
  for (int mask = 16; mask > 0; mask /= 2) {
    const A other = shuffle_xor(x, mask);
    x = other > x || other != other ? other : x;
  }
  return x;
}

template <class T, class A>
MDCP_DEVICE T narrow(A x) {
  if constexpr (sizeof(T) == 8)
    return x;
  else
    return from_float<T>(float(x));
}

template <class Function>
int by_dtype(int dtype, const Function& function) {
  switch (dtype) {
    case MDCP_F64:
      return function(double());
    case MDCP_F32:
      return function(float());
    case MDCP_BF16:
      return function(bf16());
    case MDCP_F16:
      return function(fp16());
    default:
      return MDCP_CUDA_BAD_DTYPE;
  }
}

}  // namespace mdcp::cuda
