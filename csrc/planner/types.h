// What a plan is a function of, and what the planner returns. No torch, no Python.
#pragma once

#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace mdcp {

using i64 = std::int64_t;

// Thrown when no plan exists; bindings.cc turns it into Python's PlanFailure, core.py into
// PlanError.
struct PlanFailure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class Pairs { causal, full, grid };
enum class Scheme : std::uint8_t { local, ulysses, ring, allgather, hybrid };

struct Link {
  int max_degree = 1;
  double us_per_byte = 0.0;
  double latency_us = 0.0;
};

// The cost profile (mdcp.cost/1): the fields that the formulas read.
struct Profile {
  int layers = 1, heads = 1, kv_heads = 1, head_dim = 1, element_bytes = 2;
  Pairs pairs = Pairs::causal;
  double linear_us = 0.0, attn_us = 0.0, spatial_us = 0.0, temporal_us = 0.0;
  double linear_half = 0.0, attn_half = 0.0;
  double again_linear = 0.0, again_attention = 0.0, again_comm = 0.0;  // recompute fractions
  double overhead_async = 0.0, overhead_lockstep = 0.0;
  std::vector<Link> links;
  double overlap_ring = 0.0, overlap_ulysses = 0.0, overlap_allgather = 0.0;
  bool own_comm = false;  // comm_bytes_per_token_layer is set
  double comm_bytes = 0.0;
  double static_bytes = 0.0, kept = 0.0, checkpoint = 0.0, working = 0.0, head_bytes = 0.0;
};

// Sums over the samples of one placement (megatron_dcp.cost.model.Pack).
struct Pack {
  i64 tokens = 0, pairs = 0, half = 0, pairs2 = 0, half2 = 0;

  void add(const Pack& o) {
    tokens += o.tokens;
    pairs += o.pairs;
    half += o.half;
    pairs2 += o.pairs2;
    half2 += o.half2;
  }
  bool operator==(const Pack&) const = default;
};

struct Mode {
  Scheme scheme = Scheme::local;
  int inner = 1;
};

struct Request {
  Profile profile;
  int ranks = 1, per_node = 1, stages = 1, virtual_stages = 1;
  std::vector<int> speed;  // per mille, empty: all nominal
  int lockstep = 1;
  i64 budget = 0;
  bool recompute = true;
  std::vector<Pack> samples;
};

struct Placement {
  int slot = 0, first = 0, degree = 1, recompute = 0;
  Mode mode;
  i64 time_us = 0, bytes = 0;
  std::vector<int> samples;
};

struct Plan {
  std::vector<Placement> placements;
  std::string algorithm;
  i64 makespan_us = 0, lower_bound_us = 0;
};

constexpr int kNominalSpeed = 1000;

// What a batch may take on one rank, us: 31 years. Sums of times, scaled by speeds per mille, stay
// inside 64 bits. A longer placement (a link that is no link) counts as this long: nothing runs it.
constexpr double kMostUs = 1e15;

inline i64 rounded(double us) { return us < kMostUs ? i64(std::floor(us + 0.5)) : i64(kMostUs); }

}  // namespace mdcp
