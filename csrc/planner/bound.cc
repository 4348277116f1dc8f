#include "planner/bound.h"

#include <algorithm>
#include <cmath>

#include "planner/radix.h"

namespace mdcp {

namespace {

struct Item {
  int sample, count;  // one of the samples of equal sums
  Option open;        // least work without a limit
};

// Distinct samples in a fixed order, with their unlimited optimum.
std::vector<Item> distinct(const Table& table) {
  const std::vector<Pack>& all = table.request().samples;
  std::vector<int> order(all.size());
  for (size_t j = 0; j < order.size(); ++j) order[j] = int(j);
  // By tokens, then pairs, then pairs2, then id; only a grid has pairs that tokens do not decide.
  const bool grid = table.request().profile.pairs == Pairs::grid;
  std::vector<i64> key(all.size());
  for (i64 Pack::* field : {&Pack::pairs2, &Pack::pairs, &Pack::tokens}) {
    if (!grid && field != &Pack::tokens) continue;
    for (size_t j = 0; j < all.size(); ++j) key[j] = all[j].*field;
    sort_falling(key, &order);
  }
  std::vector<Item> out;
  const double none = std::numeric_limits<double>::infinity();
  for (int j : order) {
    if (!out.empty() && all[out.back().sample] == all[j])
      ++out.back().count;
    else
      out.push_back({j, 1, table.cheapest(j, none, Family::free)});
  }
  return out;
}

// No sample of these sums is slower than the other on any degree.
bool within(const Pack& a, const Pack& b) {
  return a.tokens <= b.tokens && a.pairs <= b.pairs && a.half <= b.half && a.pairs2 <= b.pairs2 &&
         a.half2 <= b.half2;
}

double capacity(const Request& q) {
  if (q.speed.empty()) return double(q.ranks);
  i64 total = 0;
  for (int s : q.speed) total += s;
  return double(total) / kNominalSpeed;
}

}  // namespace

// C: the smallest whole us with sum of least works <= C * capacity, every sample inside C.
static i64 area_bound(const Table& table, const std::vector<Item>& items, i64 start, int fast) {
  const double ranks = capacity(table.request());
  const double o = table.cost().overhead();
  std::vector<const Item*> active;
  double fixed = 0.0;
  double total = 0.0;
  for (const Item& x : items) total = total + x.open.work * x.count;
  i64 low = std::max(start, i64(std::ceil(total / ranks)));
  const auto limit = [&](i64 c) { return double(c) * fast / kNominalSpeed + 0.5; };
  for (const Item& x : items) {
    if (x.open.alone + o <= limit(low))
      fixed = fixed + x.open.work * x.count;
    else
      active.push_back(&x);
  }
  const auto fits = [&](i64 c) {
    double sum = fixed;
    for (const Item* x : active) {
      const Option best = table.cheapest(x->sample, limit(c), Family::free);
      if (best.degree == 0) return false;
      sum = sum + best.work * x->count;
      if (sum > double(c) * ranks) return false;
    }
    return sum <= double(c) * ranks;
  };
  if (fits(low)) return low;
  i64 step = std::max<i64>(1, low / 64), high = low + step;
  while (!fits(high)) {
    low = high;
    step *= 2;
    high += step;
  }
  while (high - low > 1) {
    const i64 mid = low + (high - low) / 2;
    if (fits(mid))
      high = mid;
    else
      low = mid;
  }
  return high;
}

Bound lower_bound(const Table& table) {
  const Request& q = table.request();
  const double o = table.cost().overhead();
  const int fast =
      q.speed.empty() ? kNominalSpeed : *std::max_element(q.speed.begin(), q.speed.end());
  const std::vector<Item> items = distinct(table);
  double tau = 0.0;
  i64 tokens = 0;
  const Pack* worst = nullptr;  // the sample that sets tau
  for (const Item& x : items) {
    const Pack& s = q.samples[x.sample];
    tokens += s.tokens * x.count;
    // No sample needs longer than its cheapest option, nor than one that it is contained in.
    if (x.open.alone <= tau || (worst && within(s, *worst))) continue;
    const double alone = table.fastest(x.sample).alone;
    if (alone > tau) tau = alone, worst = &s;
  }
  double us = 0.0;
  for (const Item& x : items) us += (std::min(x.open.alone, tau) + o) * x.count;
  table.require_short(us);
  const auto rounded = [&](double us) { return i64(std::floor(us * kNominalSpeed / fast + 0.5)); };
  const i64 longest = rounded(tau + o);
  i64 area = area_bound(table, items, longest, fast);
  // Without an overhead to charge it to, rounding may save half a us per placement.
  if (o < 0.5) area = std::max(longest, area - i64(q.samples.size() + 1) / 2);
  i64 bound = std::max(longest, area);
  if (q.lockstep == q.ranks && q.ranks > 1) {
    const int layers = table.cost().layers();
    double least = table.cost().bytes_per_token(0);
    if (q.recompute) least = std::min(least, table.cost().bytes_per_token(layers));
    double slots = 1.0;
    if (table.net_budget() > 0.0)
      slots = std::max(1.0, std::ceil(double(tokens) * least / (q.ranks * table.net_budget())));
    const double all = (tau + table.bound_overhead() * slots) * kNominalSpeed / fast;
    bound = std::max(bound, i64(std::floor(all)));
  }
  return {bound + (q.stages - 1) * longest, area};
}

}  // namespace mdcp
