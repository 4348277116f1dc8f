// Time and bytes of one placement: megatron_dcp/cost/model.py, line by line.
//
// Doubles with + - * / in one fixed order; compiled with -ffp-contract=off. A change on either side
// is a change on both: tests/property/test_planner_oracle.py compares plans to the byte.
#pragma once

#include "planner/types.h"

namespace mdcp {

struct Parts {
  double linear, attention, comm;
  double sum() const { return linear + attention + comm; }
};

class Cost {
 public:
  explicit Cost(const Request& request);

  Parts parts(const Pack& pack, int degree, Mode mode, int recompute) const;
  i64 time_us(const Pack& pack, int degree, Mode mode, int recompute, int speed) const;
  // One token on the slowest rank: what a rank runs where pipeline stages want a microbatch and it
  // has no placement. 0 without stages.
  i64 dummy_us() const { return dummy_us_; }
  i64 bytes(i64 tokens, int degree, Mode mode, int recompute) const;
  // Schemes that a degree may use here, in the order in which ties are broken.
  std::vector<Mode> modes(int degree) const;
  bool ulysses_allows(int degree) const;
  // Wire time per placement without latency; what a scheme may hide counts as hidden.
  double unhidden_us(i64 tokens, int degree, Mode mode) const;
  double overlap(Scheme scheme) const;
  // Bytes per token that every scheme keeps, gathered K/V aside.
  double bytes_per_token(int recompute) const;

  const Profile& profile() const { return p_; }
  int layers() const { return layers_; }
  double overhead() const { return overhead_; }
  int stages() const { return stages_; }

 private:
  const Link& link(int degree) const;
  double comm_us(i64 tokens, int degree, Mode mode, double share, double attention) const;
  void wire(i64 tokens, int degree, Mode mode, double* inner, double* outer) const;
  double gathered(i64 tokens, int degree, Mode mode) const;

  Profile p_;
  int per_node_, stages_, layers_;
  double overhead_, in_flight_;
  i64 dummy_us_ = 0;
};

Pack sample_pack(Pairs kind, i64 length, i64 frames, i64 area);
const char* scheme_name(Scheme scheme);

}  // namespace mdcp
