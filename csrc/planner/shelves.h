// Lockstep domains: every slot is a shelf whose height is its slowest placement.
//
// A shelf is filled widest first: long samples take the degree of least work that ends inside the
// height, then degree 1 by LPT. Shelves are chosen one after another for the most area per
// (height + overhead); at every step closing with one last shelf (height by bisection) is tried.
#pragma once

#include "planner/bound.h"
#include "planner/finish.h"

namespace mdcp {

// Ranks that may hold one shelf: pieces of nodes, ascending, none straddling two nodes.
struct Piece {
  int first, size;
};

class Shelves {
 public:
  Shelves(const Table& table, int first, int ranks);

  // One shelf after another until every sample is placed; heights include the overhead.
  // Appends placements from `slot` on; returns false when some sample does not fit here.
  bool run(std::vector<int> samples, int slot, std::vector<Placement>* out) const;

 private:
  struct Shelf {
    std::vector<Block> blocks;
    std::vector<int> left;
    i64 height = 0;
    double area = 0.0;
    int recompute = 0;
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
  struct Small {
    int sample;
    i64 time;
  };
  struct Wide {
    int sample;
    Fit fit;
  };

  Shelf fill(const std::vector<int>& samples, i64 height, int recompute) const;
  // First rank of a free block, or -1; `used` counts the ranks taken of each piece.
  int allocate(int degree, std::vector<int>* used) const;
  void place_wide(const std::vector<Wide>& wide, i64 height, std::vector<int>* used,
                  std::vector<Open>* open, std::vector<int>* left) const;
  void fill_gaps(i64 height, int recompute, std::vector<Small>* small,
                 std::vector<Open>* open) const;
  void place_small(const std::vector<Small>& small, const Fit& one, i64 height,
                   const std::vector<int>& used, std::vector<Open>* open,
                   std::vector<int>* left) const;
  Fit fit(int sample, i64 height, int recompute) const;
  bool close(const std::vector<int>& samples, i64 ceiling, Shelf* out) const;
  bool best_shelf(const std::vector<int>& samples, Shelf* out) const;

  const Table& table_;
  int ranks_;
  std::vector<Piece> pieces_;
  std::vector<int> levels_;   // recompute values tried per shelf
  std::vector<int> degrees_;  // degrees that fit the pieces
};

// The plan for lockstep domains of q.lockstep > 1 ranks.
Plan lockstep_plan(const Table& table, const Bound& bound);

}  // namespace mdcp
