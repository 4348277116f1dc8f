// Lockstep domains: every slot is a shelf whose height is its slowest placement.
//
// A shelf is filled widest first: long samples take the degree of least work that ends inside the
// height, then degree 1 by LPT. Shelves are chosen one after another for the most area per
// (height + overhead); at every step closing is tried: what is left is dealt in turn to a few
// shelves of like mixture, each as low as bisection finds.
#pragma once

#include "planner/bound.h"
#include "planner/finish.h"

namespace mdcp {

// Ranks that may hold one shelf: pieces of nodes, ascending, none straddling two nodes.
struct Piece {
  int first, size;
};

// Every sample on one rank, for each recompute value that was asked for.
class Singles {
 public:
  struct Level {
    i64 open = 0, cap = 0;  // us that opening a pack adds; tokens that it holds
    std::vector<i64> time;  // per sample: us inside an open pack
  };
  explicit Singles(const Table& table);
  const Level& at(int recompute) const;
  // Distinct samples by falling area, then id.
  void sort_by_area(std::vector<int>* samples) const;

 private:
  const Table& table_;
  mutable std::vector<Level> levels_;
  std::vector<int> by_area_, place_;  // samples in that order, and where each stands
};

class Shelves {
 public:
  Shelves(const Table& table, const Singles& singles, int first, int ranks);

  // One shelf after another until every sample is placed; heights include the overhead. `samples`
  // come by falling area. Appends placements from `slot` on; returns false when some sample does
  // not fit here.
  bool run(const std::vector<int>& samples, int slot, std::vector<Placement>* out) const;

 private:
  struct Shelf {
    std::vector<Block> blocks;
    std::vector<int> left;
    i64 height = 0;
    double area = 0.0, busy = 0.0;  // rank-us without overhead and recompute; area: on one rank
    int recompute = 0;
  };
  struct Stack {
    std::vector<Shelf> shelves;
    i64 total = std::numeric_limits<i64>::max() / 4;
  };
  struct Fit {
    int degree = 0, mode = 0;
    i64 time = 0, open = 0, cap = 0;
  };
  struct Open {
    int first, degree, mode;
    i64 end, room;
    std::vector<int> samples;
  };
  struct Wide {
    int sample;
    Fit fit;
  };
  // Sums over samples that a shelf is to hold.
  struct Load {
    double area = 0.0;
    i64 tokens = 0;
  };

  // shelf.cc.
  // Fills one shelf; `whole`: gives up (false) when a sample would be left.
  bool fill(const std::vector<int>& samples, i64 height, int recompute, bool whole,
            Shelf* out) const;
  // First rank of a free block, or -1; `used` counts the ranks taken of each piece, the first
  // `skip` of which hold no such block any more.
  int allocate(int degree, size_t* skip, std::vector<int>* used) const;
  void place_wide(const std::vector<Wide>& wide, i64 height, std::vector<int>* used,
                  std::vector<Open>* open, std::vector<int>* left) const;
  void fill_gaps(i64 height, int recompute, std::vector<int>* small, std::vector<Open>* open) const;
  template <class Key>
  void place_small(const std::vector<int>& small, int recompute, i64 height,
                   const std::vector<int>& used, bool whole, std::vector<Open>* open,
                   std::vector<int>* left) const;
  Fit fit(int sample, i64 height, int recompute) const;
  double again(int recompute) const;

  // shelves.cc.
  Load load(const std::vector<int>& samples) const;
  // Least us of a sample on any degree.
  i64 fastest(int sample) const;
  double estimate(const Load& all, i64 count) const;
  // The least of estimate() over counts.
  double estimate(const Load& all) const;
  bool close(const std::vector<int>& samples, i64 ceiling, Shelf* out) const;
  bool deal(const std::vector<int>& samples, i64 ceiling, std::vector<Shelf>* out) const;
  bool best_shelf(const std::vector<int>& samples, bool wide, Shelf* out) const;
  void stack(std::vector<int> samples, bool wide, Stack* best) const;
  i64 price_blocks(const Shelf& shelf, int recompute, std::vector<Placement>* out) const;
  // The placements of a shelf, with one recompute value; false: a block does not fit.
  bool settle(const Shelf& shelf, std::vector<Placement>* out) const;

  const Table& table_;
  const Singles& singles_;
  int ranks_;
  std::vector<Piece> pieces_;
  bool whole_nodes_ = true;   // no piece is smaller than a node
  std::vector<int> levels_;   // recompute values tried per shelf
  std::vector<int> degrees_;  // degrees that fit the pieces
};

// The plan for lockstep domains of q.lockstep > 1 ranks.
Plan lockstep_plan(const Table& table, const Bound& bound);

}  // namespace mdcp
