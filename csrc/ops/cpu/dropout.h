// The dropout factors of DropoutRow (convert.h), W q rows at once: one run of Philox gives a lane
// of rows its words for four neighbouring key positions. Include after `#pragma GCC target`.
#pragma once

#include <algorithm>

#include "convert.h"

namespace mdcp {

template <class S>
class DropoutLanes {
 public:
  using V = typename S::V;
  using I = typename S::I;
  static constexpr int W = S::W;

  // Rows [row, row + count) of a head; lanes from `count` on repeat the last row.
  DropoutLanes(const Dropout& d, int64_t row, int64_t count, int64_t head)
      : positions_(d.k_positions),
        threshold_(static_cast<uint32_t>(d.probability * 4294967296.0)),
        keep_(static_cast<float>(1.0 / (1.0 - d.probability))) {
    uint32_t position[W], sample[W], key1[W];
    for (int64_t l = 0; l < W; ++l) {
      const int64_t r = row + std::min(l, count - 1);
      const uint64_t id = static_cast<uint64_t>(d.sample_ids[r]);
      position[l] = static_cast<uint32_t>(d.q_positions[r]);
      sample[l] = static_cast<uint32_t>(id);
      key1[l] = static_cast<uint32_t>(d.key >> 32) ^ static_cast<uint32_t>(id >> 32);
    }
    position_ = S::load_ints(position);
    sample_ = S::load_ints(sample);
    key1_ = S::load_ints(key1);
    key0_ = S::set_int(static_cast<uint32_t>(d.key));
    head_ = S::set_int(static_cast<uint32_t>(head + d.head_offset));
  }

  // 0 or 1 / (1 - p) for each row against a key.
  V factors(int64_t k_row) {
    const uint64_t position = static_cast<uint64_t>(positions_[k_row]);
    const uint64_t group = static_cast<uint32_t>(position >> 2);
    if (group != group_) draw(static_cast<uint32_t>(group));
    return S::where_at_least(words_[position & 3], threshold_, S::set(keep_));
  }

 private:
  void draw(uint32_t group) {
    I c0 = S::set_int(group), c1 = position_, c2 = head_, c3 = sample_, k0 = key0_, k1 = key1_;
    for (int round = 0; round < 10; ++round) {
      I high_a, low_a, high_b, low_b;
      S::multiply(c0, 0xD2511F53u, high_a, low_a);
      S::multiply(c2, 0xCD9E8D57u, high_b, low_b);
      c0 = S::exclusive_or(S::exclusive_or(high_b, c1), k0);
      c2 = S::exclusive_or(S::exclusive_or(high_a, c3), k1);
      c1 = low_b;
      c3 = low_a;
      k0 = S::add_ints(k0, S::set_int(0x9E3779B9u));
      k1 = S::add_ints(k1, S::set_int(0xBB67AE85u));
    }
    words_[0] = c0;
    words_[1] = c1;
    words_[2] = c2;
    words_[3] = c3;
    group_ = group;
  }

  const int64_t* positions_;
  uint32_t threshold_;
  float keep_;
  I position_, sample_, key0_, key1_, head_;
  I words_[4];
  uint64_t group_ = ~uint64_t{0};  // none yet: groups have 32 bits
};

}  // namespace mdcp
