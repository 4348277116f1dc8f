// Random requests through the planner, every invariant checked here, in C++.
//
//   planner_fuzz FIRST COUNT
//
// Case N is a function of N alone. Prints counts and exits 0, or names the first case that breaks
// an invariant, ends below the bound, or is slower than the static plan, and exits 1.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "planner/search.h"
#include "planner/statics.h"

namespace {

using mdcp::i64;

struct Random {
  std::uint64_t state;
  std::uint64_t next() {  // splitmix64
    std::uint64_t z = (state += 0x9e3779b97f4a7c15ULL);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
  }
  int below(int n) { return int(next() % std::uint64_t(n)); }
  double unit() { return double(next() >> 11) / 9007199254740992.0; }
  template <class T>
  T pick(std::initializer_list<T> values) {
    return values.begin()[below(int(values.size()))];
  }
};

mdcp::Profile random_profile(Random& rng) {
  mdcp::Profile p;
  p.layers = rng.pick({1, 4, 32});
  p.heads = 32;
  p.kv_heads = rng.pick({1, 2, 4, 8, 32});
  p.head_dim = 128;
  p.pairs = rng.pick({mdcp::Pairs::causal, mdcp::Pairs::full, mdcp::Pairs::grid});
  p.linear_us = rng.pick({0.0, 1.0, 180.0});
  p.attn_us = p.spatial_us = rng.pick({0.0, 0.001, 0.005});
  p.temporal_us = rng.pick({0.0, 0.005});
  p.linear_half = rng.pick({0.0, 256.0});
  p.attn_half = rng.pick({0.0, 512.0});
  p.again_linear = rng.pick({0.0, 1.0 / 3});
  p.again_attention = rng.pick({0.25, 1.0 / 3});
  p.again_comm = rng.pick({0.0, 0.5});
  p.overhead_async = rng.pick({0.0, 300.5, 20000.0});
  p.overhead_lockstep = rng.pick({0.0, 629000.0});
  p.links = {{8, rng.pick({0.0, 1e-5}), rng.pick({0.0, 10.0})}, {64, 1e-4, 20.0}};
  p.overlap_ring = rng.pick({0.0, 0.9});
  p.overlap_ulysses = rng.pick({0.0, 0.3});
  p.own_comm = rng.below(3) == 0;
  p.comm_bytes = 65536;
  p.static_bytes = rng.pick({0.0, 16e9});
  p.kept = 140000;
  p.checkpoint = rng.pick({8192.0, 17500.0});
  p.working = rng.pick({0.0, 65536.0});
  p.head_bytes = rng.pick({0.0, 500000.0});
  return p;
}

mdcp::Request random_request(std::uint64_t number) {
  Random rng{number * 0x2545f4914f6cdd1dULL + 1};
  mdcp::Request q;
  q.profile = random_profile(rng);
  q.per_node = rng.pick({1, 2, 3, 4, 6, 8});
  q.ranks = q.per_node * rng.pick({1, 1, 2, 3, 4, 8});
  q.stages = q.profile.layers == 1 ? 1 : rng.pick({1, 1, 1, 2});
  if (q.stages > 1) q.virtual_stages = 1 + rng.below(2);
  q.recompute = rng.below(6) > 0;
  q.budget = i64(double(rng.pick({20, 40, 80})) * 1e9 * rng.pick({1.0, 1.0, 0.85, 0.5}));
  if (rng.below(7) == 0)
    for (int r = 0; r < q.ranks; ++r) q.speed.push_back(930 + rng.below(71));
  do q.lockstep = rng.pick({1, 1, q.ranks, 1 + rng.below(q.ranks)});
  while (q.ranks % q.lockstep);
  const int count = rng.pick({1, 2, q.ranks, 1 + rng.below(24), 1 + rng.below(300)});
  const int kind = rng.below(8);
  const i64 same = rng.pick({1, 2, 1000, 6400, 6401});
  for (int j = 0; j < count; ++j) {
    const double normal = rng.unit() + rng.unit() + rng.unit() + rng.unit() - 2.0;
    i64 n = i64(std::exp(6.5 + 2.8 * normal));
    if (kind == 0) n = same;
    if (kind == 1) n = (i64(1) << rng.below(17)) + rng.below(3) - 1;
    if (kind == 2 && j == 0) n = rng.pick({100000, 400000, 51200 * q.ranks, 51200 * q.ranks - 1});
    n = std::max<i64>(1, n);
    const i64 frames = 1 + rng.below(8);
    if (q.profile.pairs == mdcp::Pairs::grid)
      q.samples.push_back(mdcp::sample_pack(q.profile.pairs, n * frames, frames, n));
    else
      q.samples.push_back(mdcp::sample_pack(q.profile.pairs, n, 0, 0));
  }
  return q;
}

// The name of the first broken invariant, or an empty string.
std::string broken(const mdcp::Request& q, const mdcp::Plan& plan) {
  const mdcp::Table table(q);
  std::vector<int> seen(q.samples.size(), 0), slot_of(q.ranks, -1);
  std::vector<std::vector<int>> used(q.ranks / q.lockstep);
  std::vector<int> recompute;
  for (const mdcp::Placement& p : plan.placements) {
    for (int j : p.samples) ++seen[j];
    const int m = q.per_node, d = p.degree, last = p.first + d - 1;
    if (p.samples.empty()) return "covers_every_sample_once";
    if (!table.legal(d) || p.first < 0 || last >= q.ranks) return "respects_degree_limits";
    if (d <= m ? p.first / m != last / m : p.first % m != 0) return "respects_degree_limits";
    if (p.mode.scheme == mdcp::Scheme::ulysses && !table.cost().ulysses_allows(d))
      return "respects_degree_limits";
    if (p.bytes > q.budget || p.recompute < 0 || p.recompute > table.cost().layers())
      return "fits_memory";
    if (!q.recompute && p.recompute) return "fits_memory";
    const mdcp::Pack pack = mdcp::sum(q, p.samples);
    const int speed = mdcp::block_speed(q, p.first, d);
    if (p.time_us != table.cost().time_us(pack, d, p.mode, p.recompute, speed)) return "price";
    if (p.bytes != table.cost().bytes(pack.tokens, d, p.mode, p.recompute)) return "price";
    for (int r = p.first; r <= last; ++r) {
      if (slot_of[r] >= p.slot) return "blocks_are_disjoint_within_a_slot";
      slot_of[r] = p.slot;
    }
    for (int k = p.first / q.lockstep; k <= last / q.lockstep; ++k) used[k].push_back(p.slot);
    if (p.slot >= int(recompute.size())) recompute.resize(p.slot + 1, -1);
    if (q.lockstep == q.ranks && q.ranks > 1) {
      if (recompute[p.slot] >= 0 && recompute[p.slot] != p.recompute)
        return "recompute_scope_respected";
      recompute[p.slot] = p.recompute;
    }
  }
  for (int count : seen)
    if (count != 1) return "covers_every_sample_once";
  if (q.lockstep == q.ranks)
    for (std::vector<int>& slots : used) {
      std::sort(slots.begin(), slots.end());
      for (size_t i = 0; i < slots.size(); ++i)
        if (slots[i] > (i ? slots[i - 1] + 1 : 0) && q.lockstep > 1) return "lockstep_slots_match";
    }
  if (mdcp::replay(q, plan.placements, 0) != plan.makespan_us) return "makespan_is_the_replay";
  if (plan.makespan_us < plan.lower_bound_us) return "below the bound";
  mdcp::Plan fixed;
  mdcp::static_fallback(table, &fixed);
  if (!fixed.placements.empty()) {
    const i64 fixed_us = mdcp::replay(q, fixed.placements, 0);
    if (fixed_us < plan.makespan_us) return "never_slower_than_static";
    if (fixed_us < plan.lower_bound_us) return "static below the bound";
  }
  return "";
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: planner_fuzz FIRST COUNT\n");
    return 2;
  }
  const std::uint64_t first = std::strtoull(argv[1], nullptr, 10);
  const std::uint64_t count = std::strtoull(argv[2], nullptr, 10);
  std::uint64_t planned = 0, refused = 0;
  for (std::uint64_t k = first; k < first + count; ++k) {
    const mdcp::Request q = random_request(k);
    try {
      const std::string fault = broken(q, mdcp::make_plan(q));
      if (!fault.empty()) {
        std::fprintf(stderr, "case %llu: %s\n", static_cast<unsigned long long>(k), fault.c_str());
        return 1;
      }
      ++planned;
    } catch (const mdcp::PlanFailure& failure) {
      if (std::string(failure.what()).find(" needs ") == std::string::npos) {
        std::fprintf(stderr, "case %llu: %s\n", static_cast<unsigned long long>(k), failure.what());
        return 1;
      }
      ++refused;
    }
  }
  std::printf("%llu cases: %llu planned, %llu refused\n", static_cast<unsigned long long>(count),
              static_cast<unsigned long long>(planned), static_cast<unsigned long long>(refused));
  return 0;
}
