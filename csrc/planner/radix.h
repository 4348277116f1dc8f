// Stable sort of ids by falling key: radix sort, eleven bits a pass.
#pragma once

#include <algorithm>

#include "planner/types.h"

namespace mdcp {

// Equal keys keep their order. Keys are not negative; `key` is indexed by id.
inline void sort_falling(const std::vector<i64>& key, std::vector<int>* order) {
  constexpr int kBits = 11, kSize = 1 << kBits;
  i64 most = 0;
  for (int j : *order) most = std::max(most, key[j]);
  std::vector<int> sorted(order->size());
  for (int shift = 0; shift < 63 && most >> shift > 0; shift += kBits) {
    int start[kSize] = {};
    const auto digit = [&](int j) { return kSize - 1 - int(key[j] >> shift & (kSize - 1)); };
    for (int j : *order) ++start[digit(j)];
    int total = 0;
    for (int& s : start) {
      const int count = s;
      s = total;
      total += count;
    }
    for (int j : *order) sorted[start[digit(j)]++] = j;
    order->swap(sorted);
  }
}

}  // namespace mdcp
