#include "planner/statics.h"

#include <algorithm>
#include <queue>
#include <set>

namespace mdcp {

namespace {

using Packs = std::vector<std::vector<int>>;

std::vector<int> ladder(const Request& q) {
  std::set<int> out{q.ranks};
  for (int d = 1; d <= q.per_node; d *= 2) out.insert(d);
  for (int d = q.per_node; d <= q.ranks; d *= 2) out.insert(d);
  return {out.begin(), out.end()};
}

std::vector<int> blocks_of(const Request& q, int d) {
  std::vector<int> out;
  const int span = d > q.per_node ? q.ranks : q.per_node;
  for (int node = 0; node < q.ranks; node += span)
    for (int f = node; f + d <= node + span; f += d) out.push_back(f);
  return out;
}

// Longest processing time first; with speeds, onto the block that would finish first.
Packs lpt(const Table& table, const std::vector<i64>& weights, const std::vector<int>& firsts,
          int degree) {
  const Request& q = table.request();
  std::vector<int> order(weights.size()), speed;
  for (size_t j = 0; j < order.size(); ++j) order[j] = int(j);
  std::sort(order.begin(), order.end(), [&](int a, int b) {
    return weights[a] != weights[b] ? weights[a] > weights[b] : a < b;
  });
  for (int f : firsts) speed.push_back(block_speed(q, f, degree));
  Packs bins(firsts.size());
  if (std::count(speed.begin(), speed.end(), speed[0]) == i64(speed.size())) {
    using Entry = std::pair<i64, int>;
    std::priority_queue<Entry, std::vector<Entry>, std::greater<>> heap;
    for (size_t b = 0; b < bins.size(); ++b) heap.push({0, int(b)});
    for (int j : order) {
      const auto [load, b] = heap.top();
      heap.pop();
      heap.push({load + weights[j], b});
      bins[b].push_back(j);
    }
    return bins;
  }
  std::vector<i64> loads(bins.size(), 0);
  for (int j : order) {
    size_t best = 0;
    i64 best_end = -1;
    for (size_t b = 0; b < bins.size(); ++b) {
      const i64 end = (loads[b] + weights[j]) * kNominalSpeed / speed[b];
      if (best_end < 0 || end < best_end) best = b, best_end = end;
    }
    loads[best] += weights[j];
    bins[best].push_back(j);
  }
  return bins;
}

Packs first_fit_decreasing(const Request& q, std::vector<int> samples, i64 cap) {
  std::sort(samples.begin(), samples.end(), [&](int a, int b) {
    return q.samples[a].tokens != q.samples[b].tokens ? q.samples[a].tokens > q.samples[b].tokens
                                                      : a < b;
  });
  Packs packs;
  std::vector<i64> room;
  size_t open = 0;  // packs before it are full for every sample that is left
  for (int j : samples) {
    const i64 t = q.samples[j].tokens;
    while (open < room.size() && room[open] == 0) ++open;
    size_t k = open;
    while (k < room.size() && room[k] < t) ++k;
    if (k == room.size()) {
      packs.emplace_back();
      room.push_back(std::max(cap, t));
    }
    packs[k].push_back(j);
    room[k] -= t;
  }
  return packs;
}

struct Timed {
  i64 time;
  std::vector<int> samples;
};

// Packs, longest time first, ties by the least sample.
std::vector<Timed> timed(const Table& table, const Packs& packs, int degree) {
  std::vector<Timed> out;
  int mode, r;
  for (const std::vector<int>& samples : packs)
    out.push_back({table.best_mode(sum(table.request(), samples), degree, -1, &mode, &r), samples});
  for (Timed& t : out) std::sort(t.samples.begin(), t.samples.end());
  std::sort(out.begin(), out.end(), [](const Timed& a, const Timed& b) {
    return a.time != b.time ? a.time > b.time : a.samples[0] < b.samples[0];
  });
  return out;
}

void add(const Table& table, int slot, int first, int degree, const Timed& pack, Plan* plan) {
  Placement p;
  price(table, first, degree, -1, pack.samples, &p);
  p.slot = slot;
  plan->placements.push_back(std::move(p));
}

void keep(const Table& table, int degree, Plan plan, Plan* best) {
  close_plan(table, &plan);
  if (!best->placements.empty() && plan.makespan_us >= best->makespan_us) return;
  *best = std::move(plan);
  best->algorithm = "static degree " + std::to_string(degree);
}

void try_degree(const Table& table, int degree, Plan* best) {
  const Request& q = table.request();
  const std::vector<int> firsts = blocks_of(q, degree);
  i64 cap = 0;
  for (int m = 0; m < int(table.modes(degree).size()); ++m)
    cap = std::max(cap, table.cap(degree, m, 0));
  int mode, r;
  std::vector<i64> weights;
  std::vector<int> all;
  const i64 overhead = i64(table.cost().overhead() + 0.5);
  double total = 0.0;
  for (const Pack& s : q.samples) {
    weights.push_back(table.best_mode(s, degree, -1, &mode, &r) - overhead);
    all.push_back(int(all.size()));
    total += double(weights.back());
  }
  if (total >= kMostUs) return;
  const Packs bins = lpt(table, weights, firsts, degree);
  Plan plan;
  for (size_t b = 0; b < bins.size(); ++b) {
    int slot = 0;
    for (const Timed& t : timed(table, first_fit_decreasing(q, bins[b], cap), degree))
      add(table, slot++, firsts[b], degree, t, &plan);
  }
  keep(table, degree, std::move(plan), best);
  if (q.lockstep == 1) return;
  Plan dealt;
  const std::vector<Timed> packs = timed(table, first_fit_decreasing(q, all, cap), degree);
  for (size_t k = 0; k < packs.size(); ++k)
    add(table, int(k / firsts.size()), firsts[k % firsts.size()], degree, packs[k], &dealt);
  keep(table, degree, std::move(dealt), best);
}

// What a static plan of this degree takes at least: spares the work where it cannot win.
i64 at_least(const Table& table, int degree, const Pack& longest, double area, double tokens) {
  const Request& q = table.request();
  int mode, r, fast = kNominalSpeed;
  double speed = q.speed.empty() ? q.ranks : 0.0;
  for (int s : q.speed) speed += double(s) / kNominalSpeed, fast = std::max(fast, s);
  const i64 alone = table.best_mode(longest, degree, -1, &mode, &r) * kNominalSpeed / fast - 1;
  const double least = (area + tokens * table.wire(degree)) / speed * (1.0 - 1e-9);
  return std::max(alone, i64(least) - i64(q.samples.size()));
}

}  // namespace

void static_fallback(const Table& table, Plan* best) {
  const std::vector<Pack>& samples = table.request().samples;
  const Pack longest =
      *std::max_element(samples.begin(), samples.end(),
                        [](const Pack& a, const Pack& b) { return a.tokens < b.tokens; });
  double area = 0.0, tokens = 0.0;
  for (size_t j = 0; j < samples.size(); ++j) {
    area += table.area(int(j));
    tokens += double(samples[j].tokens);
  }
  int mode, r;
  for (int degree : ladder(table.request())) {
    if (table.best_mode(longest, degree, -1, &mode, &r) < 0) continue;
    if (!best->placements.empty() &&
        at_least(table, degree, longest, area, tokens) >= best->makespan_us)
      continue;
    try_degree(table, degree, best);
  }
}

}  // namespace mdcp
