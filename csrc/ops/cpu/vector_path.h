// The attention path of one set of register tiles. Include after `#pragma GCC target`.
#pragma once

#include "paths.h"
#include "vector_backward.h"
#include "vector_forward.h"

namespace mdcp {

template <class T>
constexpr Path vector_path(const char* name) {
  return {name,
          &Forward<T>::least_rows,
          &Forward<T>::most_rows,
          &Backward<T>::least_keys,
          &Backward<T>::most_keys,
          Backward<T>::kQ,
          &vector_forward<T>,
          &vector_backward<T>};
}

}  // namespace mdcp
