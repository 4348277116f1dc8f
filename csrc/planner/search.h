// Async search: wide samples first on nested windows, gaps filled, degree 1 by LPT, local search.
//
// Times inside the search are integer us per sample (`marginal`, inside an open pack) plus what
// opening a pack adds; finish.h prices the chosen layout exactly.
#pragma once

#include "planner/bound.h"
#include "planner/finish.h"

namespace mdcp {

// One candidate of the portfolio.
struct Candidate {
  i64 target = 0;    // us that a rank should end at
  int theta = 1000;  // per mille of the target that one wide placement may take
  Family family = Family::powers;
  bool fill = false;  // close gaps of wide windows with short samples at the window's degree
  const std::vector<int>* forced = nullptr;  // per sample: its degree, 0: chosen here
  // Halve the range of targets: where one sample decides the step, the mean load of a low target,
  // which makes it needlessly wide, says nothing of higher ones.
  bool patient = false;
};

// Where each sample of a candidate runs, and when each rank would end (estimate).
struct Layout {
  std::vector<Block> wide;   // in execution order
  std::vector<i64> base;     // per rank, us: the wide part
  std::vector<i64> load;     // per rank, us
  std::vector<int> rank_of;  // per sample: its rank on degree 1, or -1
  i64 end = 0;               // the latest
  i64 mean = 0;
};

class Search {
 public:
  explicit Search(const Table& table);

  void layout(const Candidate& candidate, Layout* out) const;
  // Moves and swaps degree-1 samples between the slowest and the fastest ranks.
  void improve(Layout* layout) const;
  Plan plan(const Bound& bound) const;

  // Lockstep domains of `domain` ranks: samples that run inside one, and blocks of the others.
  void split(i64 target, int domain, std::vector<int>* inside, std::vector<Block>* across) const;
  const std::vector<int>& order() const { return order_; }
  i64 work(int sample) const { return time1_[sample]; }

 private:
  struct Item {
    int sample, degree, mode;
    i64 time, open;  // us: the sample in an open pack; what opening a pack adds
    i64 cap;         // tokens that an open pack may hold; 0: the sample runs alone
  };
  // The last pack of a wide window: what may still join it.
  struct Gap {
    int block, mode;
    i64 end, room;
  };

  bool promising(const Layout& trial, const Layout& best) const;
  void widen(Candidate c, int budget, Layout* best) const;
  Plan complete(const Candidate& chosen, Layout* layout) const;
  void tune(Candidate c, i64 low, int rounds, Layout* best, Candidate* chosen) const;

  struct Window {
    i64 key;
    int first;
    bool operator<(const Window& o) const { return key != o.key ? key < o.key : first < o.first; }
  };

  std::vector<Item> choose(const Candidate& candidate, std::vector<int>* small) const;
  void place_wide(const Candidate& candidate, const std::vector<Item>& items, Layout* out,
                  std::vector<Gap>* gaps) const;
  Item item(int sample, const Option& option) const;
  // Where an item that fits no window of its degree would end first on a smaller degree; `end` is
  // what must be beaten. False: nowhere.
  bool narrow(const Candidate& candidate, const std::vector<i64>& load, i64 end, Item* item,
              int* first) const;
  std::vector<Window> windows(Family family, int degree, const std::vector<i64>& load) const;
  void fill_gaps(const Candidate& candidate, const std::vector<Gap>& gaps, std::vector<int>* small,
                 Layout* out) const;
  template <class Key>
  void place_small(const std::vector<int>& small, Layout* out) const;
  i64 scaled(i64 us, int first, int degree) const;
  i64 singles_us(const std::vector<int>& samples, int rank) const;

  const Table& table_;
  const Request& q_;
  std::vector<int> order_;  // samples, decreasing time on one rank, then id
  std::vector<i64> time1_;  // per sample: us on one rank inside an open pack
  i64 open1_ = 0, cap1_ = 0;
  mutable std::vector<i64> room_;  // of singles_us
};

Plan make_plan(const Request& request);

}  // namespace mdcp
