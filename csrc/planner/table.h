// What one sample costs on every degree: least recompute that fits, time alone, amortised work.
//
// Invariants: degrees are every one that the topology allows, ascending; ties go to the smaller
// degree, then the earlier scheme, then the smaller recompute. Memory limits are memoised.
#pragma once

#include <limits>

#include "planner/cost.h"

namespace mdcp {

// One way to run a sample. degree 0: none fits.
struct Option {
  int degree = 0, mode = 0, recompute = 0;                // mode: index into Table::modes(degree)
  double alone = 0.0;                                     // us, the sample alone, without overhead
  double work = std::numeric_limits<double>::infinity();  // rank-us, amortised (bound's terms)
};

enum class Family { powers, free };

class Table {
 public:
  explicit Table(const Request& request);

  // The option of least work whose time alone plus overhead is at most `limit` us. keep below 1:
  // the search's work, communication counted as it is; a wider block must bring it below `keep`
  // times what a narrower one takes. 1: the bound's, which may leave some out.
  Option cheapest(int sample, double limit, Family family, double keep = 1.0) const;
  // The option of least time alone, over every legal degree.
  Option fastest(int sample) const;
  // The option of least time alone on one degree.
  Option on(int sample, int degree) const;
  // Degrees of the family, ascending.
  bool in_family(int degree, Family family) const {
    return family == Family::free || power_[index(degree)];
  }
  // Least recompute with which `tokens` fit, or -1.
  int least_recompute(i64 tokens, int degree, int mode) const;
  // Most tokens of one placement with `recompute` layers recomputed.
  i64 cap(int degree, int mode, int recompute) const;
  // Fastest mode of a whole pack on a degree: with exactly `exact` recomputed layers, or (-1) each
  // mode with the least that fits. Returns the time in us at nominal speed, -1: it does not fit.
  i64 best_mode(const Pack& pack, int degree, int exact, int* mode, int* r) const;
  // False when `packs` packs on one rank, none recomputed, are surely no slower than one pack
  // fewer.
  bool fewer_may_win(i64 tokens, int packs) const;
  // Throws PlanFailure when a sample fits nowhere.
  void require_feasible() const;
  // Throws PlanFailure when what the batch takes, us at nominal speed, may leave 64 bits.
  void require_short(double us) const;

  const std::vector<int>& degrees() const { return degrees_; }
  bool legal(int degree) const;
  const std::vector<Mode>& modes(int degree) const { return modes_[index(degree)]; }
  const Request& request() const { return request_; }
  const Cost& cost() const { return cost_; }
  // The sample alone on one rank, without recompute.
  const Parts& single(int sample) const { return single_[sample]; }
  // Rank-us of linear and attention work on one rank, without recompute.
  double area(int sample) const { return area_[sample]; }
  // Least wire rank-us per token on this degree.
  double wire(int degree) const { return wire_[index(degree)]; }
  // The least of wire() from this degree on, rounded down.
  double wire_from(int degree) const { return suffix_[index(degree)]; }
  double net_budget() const { return net_; }
  // Overhead that the bound may count: half a us less, for the rounding of each placement.
  double bound_overhead() const { return bound_overhead_; }

 private:
  void check_size() const;
  // Tokens of the longest sample that fits on some block.
  i64 most_tokens() const;
  int index(int degree) const;
  // Amortised rank-us of a sample whose parts on a degree are known.
  double work(i64 tokens, double attention, double wire, int recompute) const;

  const Request& request_;
  Cost cost_;
  std::vector<int> degrees_;
  std::vector<bool> power_;                 // degree belongs to Family::powers
  std::vector<std::vector<Mode>> modes_;    // per degree
  std::vector<std::vector<double>> wires_;  // per degree and mode: unhidden rank-us per token
  std::vector<double> wire_;                // per degree: the least of them
  std::vector<Parts> single_;               // per sample
  std::vector<double> area_, floor_;        // per sample: rank-us; with amortised overhead
  std::vector<double> suffix_;              // least wire rank-us per token from this degree on
  std::vector<double> per_token_;           // amortised linear + overhead per token, per recompute
  std::vector<double> memory_share_;        // bytes per token / net budget, per recompute
  double net_ = 0.0, bound_overhead_ = 0.0;
  bool monotone_ = true;  // more recompute never amortises better
  // Most tokens per degree, then (mode, recompute); empty until a degree is asked for.
  mutable std::vector<std::vector<i64>> caps_;
};

}  // namespace mdcp
