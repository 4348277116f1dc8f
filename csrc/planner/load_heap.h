// A min-heap of (load, id) packed into one integer, four children a node: LPT's queue.
#pragma once

#include <bit>

#include "planner/types.h"

namespace mdcp {

// Key: an unsigned integer that holds the largest load shifted by the bits of an id. Equal loads
// come by id, so the order in which entries leave does not depend on the shape of the heap.
template <class Key>
class LoadHeap {
 public:
  explicit LoadHeap(int ids) : bits_(std::bit_width(unsigned(ids))) {}

  void add(i64 load, int id) { keys_.push_back(Key(load) << bits_ | Key(id)); }
  // After the last add().
  void order() {
    size_ = keys_.size();
    keys_.resize(size_ + 3, ~Key(0));  // sentinels: four children always exist
    for (size_t i = (size_ + 2) / 4; i-- > 0;) sift(i);
  }
  bool empty() const { return size_ == 0; }
  i64 load() const { return i64(keys_[0] >> bits_); }
  int id() const { return int(keys_[0] & ((Key(1) << bits_) - 1)); }
  // The top gets another load.
  void replace(i64 load) {
    keys_[0] = Key(load) << bits_ | Key(id());
    sift(0);
  }

  void pop() {
    keys_[0] = keys_[--size_];
    keys_[size_] = ~Key(0);
    keys_.pop_back();
    if (size_ > 0) sift(0);
  }
  void push(i64 load, int id) {
    const Key x = Key(load) << bits_ | Key(id);
    size_t i = size_++;
    keys_.push_back(~Key(0));
    for (; i > 0 && x < keys_[(i - 1) / 4]; i = (i - 1) / 4) keys_[i] = keys_[(i - 1) / 4];
    keys_[i] = x;
  }

 private:
  void sift(size_t i) {
    Key* const keys = keys_.data();
    const Key x = keys[i];
    for (size_t c = 4 * i + 1; c < size_; c = 4 * i + 1) {
      const size_t left = keys[c + 1] < keys[c] ? c + 1 : c;
      const size_t right = keys[c + 3] < keys[c + 2] ? c + 3 : c + 2;
      const size_t least = keys[right] < keys[left] ? right : left;
      if (keys[least] >= x) break;
      keys[i] = keys[least];
      i = least;
    }
    keys[i] = x;
  }

  int bits_;
  size_t size_ = 0;
  std::vector<Key> keys_;
};

// Whether a 64-bit key holds these loads.
inline bool fits_64(i64 load, int ids) { return ids < 1 << 20 && load < i64(1) << 43; }

}  // namespace mdcp
