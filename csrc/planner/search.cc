#include "planner/search.h"

#include <algorithm>

#include "planner/radix.h"
#include "planner/shelves.h"
#include "planner/statics.h"

namespace mdcp {

namespace {

constexpr i64 kEffort = 40000;     // samples + ranks over all layouts of one tuning
constexpr i64 kSteps = 60000;      // the same over all layouts of widen()
constexpr i64 kSmallBatch = 2048;  // samples up to which the portfolio is whole from the start
constexpr i64 kFar = 20;           // larger ones get it where a 20th above the bound
constexpr int kLargeRounds = 3;    // layouts of one tuning before that

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
    time1_[j] = rounded(table.single(j).sum() + cost.overhead()) - open1_;
    order_[j] = j;
  }
  sort_falling(time1_, &order_);
}

i64 Search::scaled(i64 us, int first, int degree) const {
  if (q_.speed.empty()) return us;
  const int s = block_speed(q_, first, degree);
  return (us * kNominalSpeed + s / 2) / s;
}

Search::Item Search::item(int sample, const Option& o) const {
  const Cost& cost = table_.cost();
  const Mode mode = table_.modes(o.degree)[o.mode];
  const i64 open = rounded(cost.parts({}, o.degree, mode, 0).sum() + cost.overhead());
  const i64 cap = o.recompute ? 0 : table_.cap(o.degree, o.mode, 0);
  return {sample, o.degree, o.mode, rounded(o.alone + cost.overhead()) - open, open, cap};
}

// The target at which a family just succeeds: a target that is too low leaves degree 1 with too
// much, one that is too high leaves wide windows with too much. Spends at most `rounds` layouts.
void Search::tune(Candidate c, i64 low, int rounds, Layout* best, Candidate* chosen) const {
  Layout trial;
  i64 high = best->end, step = c.target / 400;
  bool reached = false;
  // A layout this near its mean load, in parts of it, is done.
  const i64 fine = i64(q_.samples.size()) <= kSmallBatch ? 1000 : 500;
  for (int k = 0; k < rounds; ++k) {
    layout(c, &trial);
    if (promising(trial, *best)) improve(&trial);
    const i64 mean = c.patient ? low : std::max(low, trial.mean);
    if (trial.end <= c.target + c.target / 2000) {
      high = std::min(high, c.target);
      reached = true;
    } else {
      low = std::max(low, c.target);
    }
    if (trial.end < best->end) {
      std::swap(*best, trial);
      *chosen = c;
    }
    high = std::min(high, best->end);
    if (high - mean <= mean / fine || high - low <= low / fine) break;
    i64 next = mean + mean / 400;
    if (!reached && next < low + step) {
      next = low + step;
      step *= 2;
    }
    if (c.patient || next <= low || next >= high) next = low + (high - low) / 2;
    c.target = next;
  }
}

Plan Search::complete(const Candidate& chosen, Layout* layout) const {
  std::vector<Block> blocks = std::move(layout->wide);
  std::vector<int> single(q_.ranks, -1);
  for (int j : order_) {
    const int r = layout->rank_of[j];
    if (r < 0) continue;
    if (single[r] < 0) {
      single[r] = int(blocks.size());
      blocks.push_back({r, 1, {}});
    }
    blocks[single[r]].samples.push_back(j);
  }
  Plan plan = finish(table_, blocks);
  plan.algorithm = std::string(chosen.family == Family::powers ? "powers" : "free") +
                   (chosen.fill ? "-fill-" : "-") + std::to_string(chosen.theta);
  return plan;
}

Plan Search::plan(const Bound& bound) const {
  Candidate chosen;
  Layout best;
  best.end = std::numeric_limits<i64>::max();
  const i64 samples = i64(q_.samples.size()), size = samples + q_.ranks;
  const i64 goal = bound.area + bound.area / 100, near = bound.area + bound.area / 500;
  const bool small = samples <= kSmallBatch;
  bool whole = small;
  // A rank opens a pack at least; the bound counts it only by its share of memory.
  i64 tokens = 0;
  for (const Pack& s : q_.samples) tokens += s.tokens;
  const i64 start = tokens / q_.ranks < cap1_ ? std::max(near, bound.area + open1_) : near;
  const auto portfolio = [&] {
    const int rounds = whole ? int(std::clamp<i64>(kEffort / size, 6, 16)) : kLargeRounds;
    for (const int theta : {1000, 500, 340}) {
      for (const bool fill : {true, false}) {
        const bool more = theta < 1000 || !fill;
        if (more && (best.end <= goal || !whole)) continue;
        for (const Family family : {Family::powers, Family::free}) {
          if (best.end <= bound.area + bound.area / 400) break;
          Candidate c{start, theta, family, fill, nullptr, whole && !small};
          if (!whole && family == Family::free)
            c.target = std::max(near, best.end - best.end / 400);
          tune(c, bound.area, rounds, &best, &chosen);
        }
      }
    }
  };
  portfolio();
  if (!whole && best.end > bound.area + bound.area / kFar) {
    whole = true;
    portfolio();
  }
  improve(&best);
  Layout other;
  if (samples <= 4 * q_.ranks && whole && best.end > goal) {
    other = best;
    widen(chosen, int(kSteps / size), &other);
  }
  const bool widened = other.end > 0 && other.end < best.end;
  Plan plan = complete(chosen, &best);
  if (!widened) return plan;
  Plan second = complete(chosen, &other);
  return second.makespan_us < plan.makespan_us ? second : plan;
}

void Search::split(i64 target, int domain, std::vector<int>* inside,
                   std::vector<Block>* across) const {
  const Candidate c{target, 1000, Family::powers, false, nullptr};
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
  std::vector<Gap> gaps;
  out.load.assign(q_.ranks, 0);
  place_wide(c, wide, &out, &gaps);
  *across = out.wide;
}

namespace {

// Shelves on all ranks, run without their waits. Pipelines: the largest placement counts `stages`
// times, and shelves keep it low; 1F1B waits for nobody at the end of a slot. False: a sample fits
// no shelf.
bool shelves_unlocked(const Table& table, Plan* plan) {
  Request q = table.request();
  if (q.lockstep == 1) q.profile.overhead_lockstep = q.profile.overhead_async;
  q.lockstep = q.ranks;
  const Table tied(q);
  const Search search(tied);
  const Singles singles(tied);
  if (!Shelves(tied, singles, 0, q.ranks).run(search.order(), 0, &plan->placements)) return false;
  for (Placement& p : plan->placements) {
    const int slot = p.slot;
    const std::vector<int> samples = p.samples;
    if (table.request().lockstep == 1) price(table, p.first, p.degree, -1, samples, &p);
    p.slot = slot;
  }
  plan->algorithm = "shelves";
  close_plan(table, plan);
  return true;
}

// With pipeline stages plans are compared with their dummies and stated without. The fastest of
// those that are not slower than the static plan either way.
Plan best_of(const Table& table, std::vector<Plan> plans) {
  const Request& q = table.request();
  i64 limit = std::numeric_limits<i64>::max();
  Plan fixed;
  static_fallback(table, &fixed);
  if (!fixed.placements.empty()) {
    limit = replay(q, fixed.placements, 0);
    plans.push_back(std::move(fixed));
  }
  Plan* best = nullptr;
  for (Plan& plan : plans)
    if (replay(q, plan.placements, 0) <= limit && (!best || plan.makespan_us < best->makespan_us))
      best = &plan;
  best->makespan_us = replay(q, best->placements, 0);
  return std::move(*best);
}

}  // namespace

Plan make_plan(const Request& request) {
  const Table table(request);
  table.require_feasible();
  const Bound bound = lower_bound(table);
  Plan plan = request.lockstep > 1 ? lockstep_plan(table, bound) : Search(table).plan(bound);
  if (request.stages > 1) {
    std::vector<Plan> plans(1, std::move(plan));
    Plan other;
    if (request.lockstep < request.ranks && shelves_unlocked(table, &other))
      plans.push_back(std::move(other));
    plan = best_of(table, std::move(plans));
  } else {
    static_fallback(table, &plan);
  }
  plan.lower_bound_us = bound.us;
  return plan;
}

}  // namespace mdcp
