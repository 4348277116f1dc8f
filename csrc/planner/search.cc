#include "planner/search.h"

#include <algorithm>
#include <cmath>
#include <queue>

#include "planner/shelves.h"
#include "planner/statics.h"

namespace mdcp {

namespace {

i64 rounded(double us) { return i64(std::floor(us + 0.5)); }

}  // namespace

Search::Search(const Table& table) : table_(table), q_(table.request()) {
  const Cost& cost = table.cost();
  const Mode local{Scheme::local, 1};
  open1_ = rounded(cost.parts({}, 1, local, 0).sum() + cost.overhead());
  cap1_ = table.cap(1, 0, 0);
  const int n = int(q_.samples.size());
  time1_.resize(n);
  order_.resize(n);
  for (int j = 0; j < n; ++j) {
    time1_[j] = rounded(cost.parts(q_.samples[j], 1, local, 0).sum() + cost.overhead()) - open1_;
    order_[j] = j;
  }
  std::sort(order_.begin(), order_.end(),
            [&](int a, int b) { return time1_[a] != time1_[b] ? time1_[a] > time1_[b] : a < b; });
}

i64 Search::scaled(i64 us, int first, int degree) const {
  if (q_.speed.empty()) return us;
  const int s = block_speed(q_, first, degree);
  return (us * kNominalSpeed + s / 2) / s;
}

// Degree of every sample: the least work that ends within theta * target.
std::vector<Search::Item> Search::choose(const Candidate& c, std::vector<int>* small) const {
  const Cost& cost = table_.cost();
  const i64 limit = c.target * c.theta / 1000;
  std::vector<Item> wide;
  const Pack* last = nullptr;
  Option option;
  for (int j : order_) {
    const Pack& s = q_.samples[j];
    if (s.tokens <= cap1_ && time1_[j] + open1_ <= limit) {
      small->push_back(j);
      continue;
    }
    if (!last || !(*last == s)) {
      option = table_.cheapest(s, double(limit), c.family);
      if (option.degree == 0) option = table_.fastest(s);
      last = &s;
    }
    const Mode mode = table_.modes(option.degree)[option.mode];
    const i64 open = rounded(cost.parts({}, option.degree, mode, 0).sum() + cost.overhead());
    const i64 time = rounded(option.alone + cost.overhead()) - open;
    const i64 cap = option.recompute ? 0 : table_.cap(option.degree, option.mode, 0);
    wide.push_back({j, option.degree, time, open, cap});
  }
  std::stable_sort(wide.begin(), wide.end(), [](const Item& a, const Item& b) {
    return a.degree != b.degree ? a.degree > b.degree : a.time > b.time;
  });
  return wide;
}

// Widest first. A window is `degree` ranks; of the windows of one degree the fullest that still
// ends within the target is taken (stack), else the one that ends first.
void Search::place_wide(const Candidate& c, const std::vector<Item>& items, Layout* out) const {
  const int n = q_.ranks, m = q_.per_node;
  std::vector<i64> end(n), room(n);  // per window (by first rank): latest finish, open pack's room
  std::vector<int> starts, block_of(n);
  int degree = 0;
  for (const Item& x : items) {
    const int d = x.degree;
    if (d != degree) {
      degree = d;
      starts.clear();
      const int unit = d > m ? m : 1, span = d > m ? n : m;
      const int step = c.family == Family::powers || d == 1 ? d : unit;
      for (int node = 0; node < n; node += span)
        for (int f = node; f + d <= node + span; f += step) starts.push_back(f);
      for (int f : starts) {
        end[f] = *std::max_element(out->load.begin() + f, out->load.begin() + f + d);
        room[f] = -1;
        block_of[f] = -1;
      }
    }
    const i64 tokens = q_.samples[x.sample].tokens;
    int best = -1, first = -1;
    i64 best_end = 0, first_end = 0;
    for (int f : starts) {
      i64 t = room[f] >= tokens ? x.time : x.time + x.open;
      t = end[f] + scaled(t, f, d);
      if (first < 0 || t < first_end) first = f, first_end = t;
      if (c.stack && t <= c.target && (best < 0 || t > best_end)) best = f, best_end = t;
    }
    if (best < 0) best = first, best_end = first_end;
    if (room[best] >= tokens)
      room[best] -= tokens;
    else
      room[best] = std::max(room[best], x.cap - tokens);
    for (int r = best; r < best + d; ++r) out->load[r] = best_end;
    const int low = d > m ? 0 : best / m * m, high = d > m ? n : low + m;
    for (int f : starts)
      if (f >= low && f < high && f < best + d && best < f + d) end[f] = std::max(end[f], best_end);
    if (block_of[best] < 0) {
      block_of[best] = int(out->wide.size());
      out->wide.push_back({best, d, {}});
    }
    out->wide[block_of[best]].samples.push_back(x.sample);
  }
}

// Longest processing time first; a rank's packs are filled first-fit.
void Search::place_small(const std::vector<int>& small, Layout* out) const {
  using Entry = std::pair<i64, int>;
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> heap;
  std::vector<std::vector<i64>> rooms(q_.ranks);
  for (int r = 0; r < q_.ranks; ++r) heap.push({out->load[r] + scaled(open1_, r, 1), r});
  for (int j : small) {
    const auto [key, r] = heap.top();
    heap.pop();
    const i64 tokens = q_.samples[j].tokens;
    std::vector<i64>& room = rooms[r];
    size_t b = 0;
    while (b < room.size() && room[b] < tokens) ++b;
    i64 t = key + scaled(time1_[j], r, 1);
    if (b == room.size()) {
      if (b > 0) t += scaled(open1_, r, 1);
      room.push_back(cap1_);
    }
    room[b] -= tokens;
    out->singles[r].push_back(j);
    out->load[r] = t;
    heap.push({t, r});
  }
}

Layout Search::layout(const Candidate& c) const {
  Layout out;
  out.load.assign(q_.ranks, 0);
  out.singles.resize(q_.ranks);
  std::vector<int> small;
  const std::vector<Item> wide = choose(c, &small);
  place_wide(c, wide, &out);
  out.base = out.load;
  place_small(small, &out);
  out.end = *std::max_element(out.load.begin(), out.load.end());
  return out;
}

Plan Search::plan(const Bound& bound) const {
  Candidate best;
  i64 best_end = -1;
  for (Family family : {Family::powers, Family::free}) {
    for (int more : {0, 10, 30, 100}) {
      for (int theta : {1000, 500, 340}) {
        for (bool stack : {true, false}) {
          Candidate c{bound.area + bound.area * more / 1000, theta, family, stack};
          const Layout l = layout(c);
          if (best_end < 0 || l.end < best_end) best = c, best_end = l.end;
        }
      }
    }
  }
  Layout l = layout(best);
  std::vector<Block> blocks = l.wide;
  for (int r = 0; r < q_.ranks; ++r)
    if (!l.singles[r].empty()) blocks.push_back({r, 1, l.singles[r]});
  Plan plan = finish(table_, blocks);
  plan.algorithm = std::string(best.family == Family::powers ? "powers" : "free") +
                   (best.stack ? "-stack" : "-spread") + "-" + std::to_string(best.theta);
  return plan;
}

void Search::split(i64 target, int domain, std::vector<int>* inside,
                   std::vector<Block>* across) const {
  const Candidate c{target, 1000, Family::powers, true};
  std::vector<Item> wide;
  for (const Item& x : choose(c, inside)) {
    if (x.degree > domain)
      wide.push_back(x);
    else
      inside->push_back(x.sample);
  }
  std::sort(inside->begin(), inside->end(),
            [&](int a, int b) { return time1_[a] != time1_[b] ? time1_[a] > time1_[b] : a < b; });
  Layout out;
  out.load.assign(q_.ranks, 0);
  place_wide(c, wide, &out);
  *across = out.wide;
}

Plan make_plan(const Request& request) {
  const Table table(request);
  table.require_feasible();
  const Bound bound = lower_bound(table);
  Plan plan = request.lockstep > 1 ? lockstep_plan(table, bound) : Search(table).plan(bound);
  static_fallback(table, &plan);
  plan.lower_bound_us = bound.us;
  return plan;
}

}  // namespace mdcp
