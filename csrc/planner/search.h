// Async search: wide samples first, then degree 1 by LPT, then local search; best candidate wins.
#pragma once

#include "planner/bound.h"
#include "planner/finish.h"

namespace mdcp {

// One candidate of the portfolio.
struct Candidate {
  i64 target = 0;    // us that a rank should end at
  int theta = 1000;  // per mille of the target that one wide placement may take
  Family family = Family::powers;
  bool stack = true;  // fill windows up to the target, else always the emptiest window
};

// Where each sample of a candidate runs, and when each rank would end (estimate).
struct Layout {
  std::vector<Block> wide;                // in execution order
  std::vector<i64> load;                  // per rank, us
  std::vector<i64> base;                  // per rank: the wide part of load
  std::vector<std::vector<int>> singles;  // per rank: degree-1 samples, decreasing
  i64 end = 0;
};

class Search {
 public:
  explicit Search(const Table& table);

  Layout layout(const Candidate& candidate) const;
  Plan plan(const Bound& bound) const;

  // Lockstep domains of `domain` ranks: samples that run inside one, and blocks of the others.
  void split(i64 target, int domain, std::vector<int>* inside, std::vector<Block>* across) const;
  const std::vector<int>& order() const { return order_; }
  i64 work(int sample) const { return time1_[sample]; }

 private:
  struct Item {
    int sample, degree;
    i64 time, open;  // us: the sample in an open pack; what opening a pack adds
    i64 cap;         // tokens that an open pack may hold; 0: the sample runs alone
  };

  std::vector<Item> choose(const Candidate& candidate, std::vector<int>* small) const;
  void place_wide(const Candidate& candidate, const std::vector<Item>& items, Layout* out) const;
  void place_small(const std::vector<int>& small, Layout* out) const;
  i64 scaled(i64 us, int first, int degree) const;

  const Table& table_;
  const Request& q_;
  std::vector<int> order_;  // samples, decreasing time on one rank, then id
  std::vector<i64> time1_;  // per sample: us on one rank inside an open pack
  i64 open1_ = 0, cap1_ = 0;
};

Plan make_plan(const Request& request);

}  // namespace mdcp
