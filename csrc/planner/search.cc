#include "planner/search.h"

#include <algorithm>
#include <cmath>

#include "planner/shelves.h"
#include "planner/statics.h"

namespace mdcp {

namespace {

constexpr i64 kEffort = 18000;     // samples + ranks over all layouts of one tuning
constexpr int kSmallBatch = 2048;  // samples up to which every layout is searched locally
constexpr int kMostNarrowed = 64;  // narrow() scans all ranks
constexpr i64 kFineShare = 1000;   // a layout this near its mean load is done

i64 rounded(double us) { return i64(std::floor(us + 0.5)); }

// The root of a heap of (load, rank) grows: restore the order.
struct Entry {
  i64 load;
  int rank;
  bool operator<(const Entry& o) const { return load != o.load ? load < o.load : rank < o.rank; }
};

void sift_down(std::vector<Entry>& heap) {
  const size_t n = heap.size();
  const Entry x = heap[0];
  size_t i = 0;
  for (size_t c = 1; c < n; c = 2 * i + 1) {
    if (c + 1 < n && heap[c + 1] < heap[c]) ++c;
    if (!(heap[c] < x)) break;
    heap[i] = heap[c];
    i = c;
  }
  heap[i] = x;
}

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

Search::Item Search::item(int sample, const Option& o) const {
  const Cost& cost = table_.cost();
  const Mode mode = table_.modes(o.degree)[o.mode];
  const i64 open = rounded(cost.parts({}, o.degree, mode, 0).sum() + cost.overhead());
  const i64 cap = o.recompute ? 0 : table_.cap(o.degree, o.mode, 0);
  return {sample, o.degree, o.mode, rounded(o.alone + cost.overhead()) - open, open, cap};
}

// Degree of every sample: the least work that ends within theta * target.
std::vector<Search::Item> Search::choose(const Candidate& c, std::vector<int>* small) const {
  const i64 limit = c.target * c.theta / 1000;
  std::vector<Item> wide;
  const Pack* last = nullptr;
  Item next{};
  for (int j : order_) {
    const Pack& s = q_.samples[j];
    if (s.tokens <= cap1_ && time1_[j] + open1_ <= limit) {
      small->push_back(j);
      continue;
    }
    if (!last || !(*last == s)) {
      Option o = table_.cheapest(j, double(limit), c.family);
      if (o.degree == 0) o = table_.fastest(j);
      next = item(j, o);
      last = &s;
    }
    next.sample = j;
    wide.push_back(next);
  }
  std::stable_sort(wide.begin(), wide.end(), [](const Item& a, const Item& b) {
    return a.degree != b.degree ? a.degree > b.degree : a.time > b.time;
  });
  return wide;
}

// Windows of a degree where blocks may start: aligned (powers), or where the load changes.
std::vector<Search::Window> Search::windows(Family family, int d,
                                            const std::vector<i64>& load) const {
  const int n = q_.ranks, m = q_.per_node, span = d > m ? n : m;
  const int step = family == Family::powers ? d : (d > m ? m : 1);
  std::vector<Window> out;
  for (int node = 0; node < n; node += span) {
    for (int f = node; f + d <= node + span; f += step) {
      if (step != d && f > node && load[f] == load[f - 1]) continue;
      out.push_back({*std::max_element(load.begin() + f, load.begin() + f + d), f});
    }
  }
  std::sort(out.begin(), out.end());
  return out;
}

bool Search::narrow(const Candidate& c, const std::vector<i64>& load, i64 end, Item* x,
                    int* first) const {
  const int n = q_.ranks, m = q_.per_node;
  const int widest = x->degree;
  bool found = false;
  for (int d : table_.degrees()) {
    if (d >= widest) break;
    if (!table_.in_family(d, c.family)) continue;
    const Option o = table_.on(x->sample, d);
    if (o.degree == 0) continue;
    const Item y = item(x->sample, o);
    const int span = d > m ? n : m;
    const int step = c.family == Family::powers ? d : (d > m ? m : 1);
    for (int node = 0; node < n; node += span) {
      for (int f = node; f + d <= node + span; f += step) {
        const i64 t = *std::max_element(load.begin() + f, load.begin() + f + d) +
                      scaled(y.time + y.open, f, d);
        if (t >= end) continue;
        end = t;
        *x = y;
        *first = f;
        found = true;
      }
    }
  }
  return found;
}

// Widest first. Of the windows of one degree the fullest that still ends within the target is
// taken, else the one that ends first, here or on a smaller degree. Items of a degree come with
// falling times, so a window that once fits stays fit until it is used: `ready` is a stack ordered
// by key, `later` a heap.
void Search::place_wide(const Candidate& c, const std::vector<Item>& items, Layout* out,
                        std::vector<Gap>* gaps) const {
  const int n = q_.ranks, m = q_.per_node;
  const auto after = [](const Window& a, const Window& b) { return b < a; };
  std::vector<Window> later, ready;
  std::vector<i64> room(n, -1);
  std::vector<int> block_of(n, -1);
  const auto latest = [&](int f, int d) {
    return *std::max_element(out->load.begin() + f, out->load.begin() + f + d);
  };
  const auto wait = [&](i64 key, int f) {
    later.push_back({key, f});
    std::push_heap(later.begin(), later.end(), after);
  };
  int degree = 0, narrowed = 0;
  for (const Item& x : items) {
    const int d = x.degree;
    if (d != degree) {
      degree = d;
      later = windows(c.family, d, out->load);
      ready.clear();
      std::fill(room.begin(), room.end(), -1);
      std::fill(block_of.begin(), block_of.end(), -1);
    }
    const i64 tokens = q_.samples[x.sample].tokens, limit = c.target - x.time - x.open;
    int f = 0;
    for (;;) {
      while (!later.empty() && later[0].key <= limit) {
        std::pop_heap(later.begin(), later.end(), after);
        ready.push_back(later.back());
        later.pop_back();
      }
      const bool fits = !ready.empty();
      if (!fits) std::pop_heap(later.begin(), later.end(), after);
      std::vector<Window>& from = fits ? ready : later;
      const Window w = from.back();
      from.pop_back();
      // Windows overlap in the free family: an outdated one returns with its present end.
      f = w.first;
      const i64 key = room[f] >= tokens ? latest(f, d) - x.open : latest(f, d);
      if (key <= w.key) break;
      wait(key, f);
    }
    const i64 start = latest(f, d);
    const i64 end = start + scaled(room[f] >= tokens ? x.time : x.time + x.open, f, d);
    Item y = x;
    int g = f;
    if (end > c.target && narrowed < kMostNarrowed && narrow(c, out->load, end, &y, &g)) {
      ++narrowed;
      const i64 stop = latest(g, y.degree) + scaled(y.time + y.open, g, y.degree);
      std::fill(out->load.begin() + g, out->load.begin() + g + y.degree, stop);
      gaps->push_back({int(out->wide.size()), y.mode, stop, y.cap - tokens});
      out->wide.push_back({g, y.degree, {x.sample}});
      wait(start, f);
      continue;
    }
    std::fill(out->load.begin() + f, out->load.begin() + f + d, end);
    room[f] = std::max(room[f] - tokens, x.cap - tokens);
    if (block_of[f] < 0) {
      block_of[f] = int(out->wide.size());
      out->wide.push_back({f, d, {}});
      gaps->push_back({block_of[f], x.mode, 0, -1});
    }
    Block& block = out->wide[block_of[f]];
    block.samples.push_back(x.sample);
    (*gaps)[block_of[f]].end = end;
    (*gaps)[block_of[f]].room = room[f];
    wait(room[f] >= tokens ? end - x.open : end, f);
    const int stop = d > m ? n : f / m * m + m, next = f + d;
    if (c.family == Family::free && next + d <= stop && block_of[next] < 0)
      wait(latest(next, d), next);
  }
}

// Short samples join the last pack of a wide window instead of opening packs of their own on its
// ranks: largest first that still ends within the target.
void Search::fill_gaps(const Candidate& c, const std::vector<Gap>& gaps, std::vector<int>* small,
                       Layout* out) const {
  const Cost& cost = table_.cost();
  std::vector<int>& list = *small;
  const int n = int(list.size());
  std::vector<int> next(n + 1);  // first free entry at or after an index
  for (int i = 0; i <= n; ++i) next[i] = i;
  const auto free = [&](int i) {
    while (next[i] != i) i = next[i] = next[next[i]];
    return i;
  };
  std::vector<bool> used(n, false);
  for (const Gap& g : gaps) {
    Block& block = out->wide[g.block];
    const int d = block.degree;
    if (d > q_.per_node || g.room <= 0) continue;
    const Mode mode = table_.modes(d)[g.mode];
    i64 end = g.end, room = g.room;
    const auto top = out->load.begin() + block.first;
    if (std::any_of(top, top + d, [&](i64 x) { return x != end; })) continue;
    if (c.target - end > 16 * open1_) continue;
    const i64 empty = rounded(cost.parts({}, d, mode, 0).sum() + cost.overhead());
    while (c.target > end) {
      // The marginal time at degree d is at least time1 / d.
      const i64 most = (c.target - end) * d;
      int i = int(std::lower_bound(list.begin(), list.end(), most,
                                   [&](int j, i64 t) { return time1_[j] > t; }) -
                  list.begin());
      i64 t = 0;
      for (i = free(i); i < n; i = free(i + 1)) {
        const Pack& s = q_.samples[list[i]];
        if (s.tokens > room) continue;
        t = rounded(cost.parts(s, d, mode, 0).sum() + cost.overhead()) - empty;
        t = scaled(t, block.first, d);
        if (end + t <= c.target) break;
      }
      if (i >= n) break;
      end += t;
      room -= q_.samples[list[i]].tokens;
      block.samples.push_back(list[i]);
      used[i] = true;
      next[i] = i + 1;
    }
    std::fill(top, top + d, end);
  }
  size_t kept = 0;
  for (int i = 0; i < n; ++i)
    if (!used[i]) list[kept++] = list[i];
  list.resize(kept);
}

// Longest processing time first; a rank's packs are filled first-fit.
void Search::place_small(const std::vector<int>& small, Layout* out) const {
  struct Bin {
    i64 room;
    int next;
  };
  std::vector<Bin> bins;
  bins.reserve(small.size());
  std::vector<int> first(q_.ranks, -1), last(q_.ranks, -1);
  std::vector<Entry> heap;
  for (int r = 0; r < q_.ranks; ++r) heap.push_back({out->load[r] + scaled(open1_, r, 1), r});
  std::sort(heap.begin(), heap.end());
  for (int j : small) {
    const int r = heap[0].rank;
    const i64 tokens = q_.samples[j].tokens;
    int b = first[r];
    while (b >= 0 && bins[b].room < tokens) b = bins[b].next;
    heap[0].load += scaled(time1_[j], r, 1);
    if (b < 0) {
      b = int(bins.size());
      bins.push_back({cap1_, -1});
      if (first[r] < 0) {
        first[r] = b;
      } else {
        bins[last[r]].next = b;
        heap[0].load += scaled(open1_, r, 1);
      }
      last[r] = b;
    }
    bins[b].room -= tokens;
    out->rank_of[j] = r;
    out->load[r] = heap[0].load;
    sift_down(heap);
  }
}

void Search::layout(const Candidate& c, Layout* out) const {
  out->wide.clear();
  out->load.assign(q_.ranks, 0);
  out->rank_of.assign(q_.samples.size(), -1);
  std::vector<int> small;
  std::vector<Gap> gaps;
  const std::vector<Item> wide = choose(c, &small);
  place_wide(c, wide, out, &gaps);
  if (c.fill) fill_gaps(c, gaps, &small, out);
  out->base = out->load;
  place_small(small, out);
  out->end = *std::max_element(out->load.begin(), out->load.end());
  i64 total = 0;
  for (i64 x : out->load) total += x;
  out->mean = total / q_.ranks;
}

// The target at which a family just succeeds: a target that is too low leaves degree 1 with too
// much, one that is too high leaves wide windows with too much. Spends at most `rounds` layouts.
void Search::tune(Candidate c, i64 low, int rounds, Layout* best, Candidate* chosen) const {
  Layout trial;
  i64 high = best->end;
  for (int k = 0; k < rounds; ++k) {
    layout(c, &trial);
    if (int(q_.samples.size()) <= kSmallBatch) improve(&trial);
    const i64 mean = std::max(low, trial.mean);
    if (trial.end <= c.target + c.target / 2000)
      high = std::min(high, c.target);
    else
      low = std::max(low, c.target);
    if (trial.end < best->end) {
      std::swap(*best, trial);
      *chosen = c;
    }
    high = std::min(high, best->end);
    if (high - mean <= mean / kFineShare || high - low <= low / kFineShare) break;
    i64 next = mean + mean / 400;
    if (next <= low || next >= high) next = low + (high - low) / 2;
    c.target = next;
  }
}

Plan Search::plan(const Bound& bound) const {
  Candidate chosen;
  Layout best;
  best.end = std::numeric_limits<i64>::max();
  const i64 goal = bound.area + bound.area / 100;
  const i64 size = i64(q_.samples.size()) + q_.ranks;
  const int rounds = int(std::clamp<i64>(kEffort / size, 3, 12));
  for (const int theta : {1000, 500, 340}) {
    for (const bool fill : {true, false}) {
      const bool more = theta < 1000 || !fill;
      if (more && (best.end <= goal || q_.samples.size() > size_t(kSmallBatch))) continue;
      for (const Family family : {Family::powers, Family::free}) {
        if (best.end <= bound.area + bound.area / 400) break;
        const Candidate c{bound.area + bound.area / 500, theta, family, fill};
        tune(c, bound.area, rounds, &best, &chosen);
      }
    }
  }
  improve(&best);
  std::vector<Block> blocks = std::move(best.wide);
  std::vector<int> single(q_.ranks, -1);
  for (int j : order_) {
    const int r = best.rank_of[j];
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

void Search::split(i64 target, int domain, std::vector<int>* inside,
                   std::vector<Block>* across) const {
  const Candidate c{target, 1000, Family::powers, false};
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
