#include "planner/finish.h"

#include <algorithm>

namespace mdcp {

namespace {

using Packs = std::vector<std::vector<int>>;

// Prices packs on one block; the total time, or -1 when one does not fit.
i64 price_all(const Table& table, const Block& block, const Packs& packs,
              std::vector<Placement>* out) {
  i64 total = 0;
  out->clear();
  for (const std::vector<int>& samples : packs) {
    Placement p;
    if (!price(table, block.first, block.degree, -1, samples, &p)) return -1;
    total += p.time_us;
    out->push_back(std::move(p));
  }
  return total;
}

// Longest first, each into the pack with the fewest tokens.
Packs spread(const Table& table, const std::vector<int>& order, size_t count) {
  Packs packs(count);
  std::vector<i64> tokens(count, 0);
  for (int j : order) {
    const size_t k = size_t(std::min_element(tokens.begin(), tokens.end()) - tokens.begin());
    tokens[k] += table.request().samples[j].tokens;
    packs[k].push_back(j);
  }
  return packs;
}

Packs first_fit(const Table& table, const std::vector<int>& order, i64 cap) {
  Packs packs;
  std::vector<i64> tokens;
  for (int j : order) {
    const i64 t = table.request().samples[j].tokens;
    size_t k = 0;
    while (k < packs.size() && tokens[k] + t > cap) ++k;
    if (k == packs.size()) {
      packs.emplace_back();
      tokens.push_back(0);
    }
    packs[k].push_back(j);
    tokens[k] += t;
  }
  return packs;
}
}  // namespace

Pack sum(const Request& request, const std::vector<int>& samples) {
  Pack total;
  for (int j : samples) total.add(request.samples[j]);
  return total;
}

bool price(const Table& table, int first, int degree, int exact, const std::vector<int>& samples,
           Placement* out) {
  const Pack pack = sum(table.request(), samples);
  int mode = 0, r = 0;
  i64 time = table.best_mode(pack, degree, exact, &mode, &r);
  if (time < 0) return false;
  const Mode how = table.modes(degree)[mode];
  const int speed = block_speed(table.request(), first, degree);
  if (speed != kNominalSpeed) time = table.cost().time_us(pack, degree, how, r, speed);
  const i64 bytes = table.cost().bytes(pack.tokens, degree, how, r);
  *out = {0, first, degree, r, how, time, bytes, samples};
  std::sort(out->samples.begin(), out->samples.end());
  return true;
}

int block_speed(const Request& request, int first, int degree) {
  if (request.speed.empty()) return kNominalSpeed;
  return *std::min_element(request.speed.begin() + first, request.speed.begin() + first + degree);
}

void pack_block(const Table& table, const Block& block, int want, std::vector<Placement>* out) {
  const std::vector<Pack>& samples = table.request().samples;
  const int d = block.degree;
  i64 cap = 0, tokens = 0;
  for (int m = 0; m < int(table.modes(d).size()); ++m) cap = std::max(cap, table.cap(d, m, 0));
  for (int j : block.samples) tokens += samples[j].tokens;
  if (block.samples.size() == 1 || (tokens <= cap && want == 0)) {  // one pack
    Placement p;
    price(table, block.first, d, -1, block.samples, &p);
    out->push_back(std::move(p));
    return;
  }
  std::vector<int> order = block.samples;
  std::sort(order.begin(), order.end(), [&](int a, int b) {
    return samples[a].tokens != samples[b].tokens ? samples[a].tokens > samples[b].tokens : a < b;
  });
  std::vector<Placement> best, other;
  const size_t count = std::min(size_t(want), order.size());
  if (want > 0 && price_all(table, block, spread(table, order, count), &best) >= 0) {
    for (Placement& p : best) out->push_back(std::move(p));
    return;
  }
  const Packs packs = first_fit(table, order, cap);
  i64 total = price_all(table, block, packs, &best);
  const auto recomputed = [](const Placement& p) { return p.recompute > 0; };
  while (best.size() > 1 && table.request().recompute) {
    // What recomputes already may recompute a little more.
    if (d == 1 && !std::any_of(best.begin(), best.end(), recomputed) &&
        !table.fewer_may_win(tokens, int(best.size())))
      break;
    const i64 t = price_all(table, block, spread(table, order, best.size() - 1), &other);
    if (t < 0 || t >= total) break;
    total = t;
    best.swap(other);
  }
  for (Placement& p : best) out->push_back(std::move(p));
}

int microbatches(const Request& request, int slots) {
  const int group = request.virtual_stages > 1 ? request.stages : 1;
  return (slots + group - 1) / group * group;
}

i64 replay(const Request& request, const std::vector<Placement>& placements, i64 dummy) {
  std::vector<i64> free(request.ranks, 0);
  std::vector<int> ran(request.ranks, 0);  // slots behind each rank
  const int domain = request.lockstep;
  const auto run_dummies = [&](int until) {
    for (int r = 0; r < request.ranks; ++r) {
      free[r] += (until - ran[r]) * dummy;
      ran[r] = until;
    }
  };
  i64 largest = 0;
  int slot = -1;
  for (const Placement& p : placements) {
    if (request.stages > 1 && p.slot != slot) run_dummies(p.slot);
    if (domain > 1 && p.slot != slot) {
      for (int f = 0; f < request.ranks; f += domain) {
        const i64 latest = *std::max_element(free.begin() + f, free.begin() + f + domain);
        std::fill(free.begin() + f, free.begin() + f + domain, latest);
      }
    }
    slot = p.slot;
    const auto begin = free.begin() + p.first, end = begin + p.degree;
    const i64 done = *std::max_element(begin, end) + p.time_us;
    std::fill(begin, end, done);
    std::fill_n(ran.begin() + p.first, p.degree, p.slot + 1);
    largest = std::max(largest, p.time_us);
  }
  if (request.stages > 1) run_dummies(microbatches(request, slot + 1));
  i64 end = 0;
  for (i64 f : free) end = std::max(end, f);
  return end + (request.stages - 1) * largest;
}

void close_plan(const Table& table, Plan* plan) {
  const Request& q = table.request();
  std::vector<Placement>& all = plan->placements;
  if (q.lockstep == q.ranks && q.ranks > 1) {
    std::vector<int> most;
    for (const Placement& p : all) {
      if (p.slot >= int(most.size())) most.resize(p.slot + 1, 0);
      most[p.slot] = std::max(most[p.slot], p.recompute);
    }
    for (Placement& p : all) {
      const int slot = p.slot;
      if (p.recompute != most[slot])
        price(table, p.first, p.degree, most[slot], std::vector<int>(p.samples), &p);
      p.slot = slot;
    }
  }
  // Blocks of a slot are disjoint: (slot, first) decides.
  std::vector<std::pair<i64, int>> order;
  for (const Placement& p : all)
    order.push_back({i64(p.slot) * q.ranks + p.first, int(order.size())});
  std::sort(order.begin(), order.end());
  std::vector<Placement> sorted;
  sorted.reserve(all.size());
  for (const auto& [key, k] : order) sorted.push_back(std::move(all[k]));
  all.swap(sorted);
  plan->makespan_us = replay(q, all, table.cost().dummy_us());
}

namespace {

constexpr int kCuts = 64;  // tries of one more pack

// Gives every placement the first slot in which its ranks are free; slots used by each rank.
std::vector<int> assign_slots(const Table& table, std::vector<Placement>* placements) {
  std::vector<int> next(table.request().ranks, 0);
  for (Placement& p : *placements) {
    const auto begin = next.begin() + p.first, end = begin + p.degree;
    p.slot = *std::max_element(begin, end);
    std::fill(begin, end, p.slot + 1);
  }
  return next;
}

// want: packs of each block, 0: as few as is fast; becomes what each has. Slots used by each rank.
std::vector<int> pack_blocks(const Table& table, const std::vector<Block>& blocks,
                             std::vector<int>* want, std::vector<Placement>* out) {
  out->clear();
  for (size_t b = 0; b < blocks.size(); ++b) {
    const size_t before = out->size();
    pack_block(table, blocks[b], (*want)[b], out);
    (*want)[b] = int(out->size() - before);
  }
  return assign_slots(table, out);
}

// As pack_blocks; with pipeline stages packs of degree 1 are cut where a dummy would follow.
Plan assemble(const Table& table, const std::vector<Block>& blocks, std::vector<int>* want) {
  const Request& q = table.request();
  Plan plan;
  std::vector<int> asked = *want;
  const std::vector<int> used = pack_blocks(table, blocks, want, &plan.placements);
  if (q.stages > 1) {
    const int count = microbatches(q, *std::max_element(used.begin(), used.end()));
    for (size_t b = 0; b < blocks.size(); ++b) {
      const int have = (*want)[b], missing = count - used[blocks[b].first];
      if (blocks[b].degree == 1 && missing > 0 && int(blocks[b].samples.size()) > have)
        asked[b] = have + missing;
    }
    *want = asked;
    pack_blocks(table, blocks, want, &plan.placements);
  }
  close_plan(table, &plan);
  return plan;
}

}  // namespace

Plan finish(const Table& table, const std::vector<Block>& blocks) {
  std::vector<int> want(blocks.size(), 0);
  Plan plan = assemble(table, blocks, &want);
  if (table.request().stages == 1) return plan;
  std::vector<int> block_of(table.request().samples.size(), -1);
  for (size_t b = 0; b < blocks.size(); ++b)
    for (int j : blocks[b].samples) block_of[j] = int(b);
  for (int k = 0; k < kCuts; ++k) {
    i64 largest = 0;
    for (const Placement& p : plan.placements) largest = std::max(largest, p.time_us);
    std::vector<bool> cut(blocks.size(), false);
    for (const Placement& p : plan.placements)
      if (p.samples.size() > 1 && p.time_us >= largest - largest / 4)
        cut[block_of[p.samples[0]]] = true;
    for (size_t b = 0; b < blocks.size(); ++b) want[b] += cut[b];
    Plan trial = assemble(table, blocks, &want);
    if (trial.makespan_us >= plan.makespan_us) break;
    plan = std::move(trial);
  }
  return plan;
}

}  // namespace mdcp
