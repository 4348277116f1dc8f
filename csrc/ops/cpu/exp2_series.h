// The polynomial behind the exponentials of the vector paths, templated on the vectors (simd_*.h).
#pragma once

namespace mdcp {

// (2^f - 1) / f for |f| <= 1/2, relative error 4e-8 before rounding.
template <class S>
typename S::V power_series(typename S::V f) {
  typename S::V p = S::set(1.5461444724808513e-4f);
  p = S::fma(p, f, S::set(1.3400428177711937e-3f));
  p = S::fma(p, f, S::set(9.61805667843204e-3f));
  p = S::fma(p, f, S::set(5.550327226669895e-2f));
  p = S::fma(p, f, S::set(2.4022650922289554e-1f));
  return S::fma(p, f, S::set(6.931472067028329e-1f));
}

}  // namespace mdcp
