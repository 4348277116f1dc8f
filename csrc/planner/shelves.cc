#include "planner/shelves.h"

#include <algorithm>
#include <cmath>
#include <queue>

#include "planner/search.h"

namespace mdcp {

namespace {

constexpr int kMaxShelves = 4096;
constexpr int kSetAside = 8;  // ranks out of tokens that one sample may pass over

i64 rounded(double us) { return i64(std::floor(us + 0.5)); }

}  // namespace

Shelves::Shelves(const Table& table, int first, int ranks) : table_(table), ranks_(ranks) {
  const Request& q = table.request();
  const int m = q.per_node;
  int widest = 0;
  for (int f = first; f < first + ranks;) {
    const int size = std::min(first + ranks, (f / m + 1) * m) - f;
    pieces_.push_back({f, size});
    widest = std::max(widest, size);
    f += size;
  }
  for (int d : table.degrees()) {
    const bool inside = d <= widest && d <= m;
    const bool nodes = d > m && d <= ranks;
    if (inside || nodes) degrees_.push_back(d);
  }
  const int layers = table.cost().layers();
  for (int k = 0; k <= (q.recompute ? 4 : 0); ++k) {
    const int r = layers * k / 4;
    if (levels_.empty() || levels_.back() != r) levels_.push_back(r);
  }
}

double Shelves::area(const Pack& s) const {
  const Parts t = table_.cost().parts(s, 1, {Scheme::local, 1}, 0);
  return t.attention +
         double(s.tokens) * table_.cost().profile().linear_us / table_.cost().stages();
}

// Degree of least work that ends inside the height with exactly this recompute.
Shelves::Fit Shelves::fit(const Pack& s, i64 height, int r) const {
  const Cost& cost = table_.cost();
  Fit best;
  double least = 0.0;
  const double floor = area(s) * (1.0 - 1e-9);
  for (int d : degrees_) {
    if (floor > double(height) * d) continue;
    if (best.degree && floor >= least) break;
    const std::vector<Mode>& modes = table_.modes(d);
    for (int m = 0; m < int(modes.size()); ++m) {
      const i64 cap = table_.cap(d, m, r);
      if (s.tokens > cap) continue;
      const double alone = cost.parts(s, d, modes[m], r).sum();
      const i64 total = rounded(alone + cost.overhead());
      if (total > height || (best.degree && alone * d >= least)) continue;
      const i64 open = rounded(cost.parts({}, d, modes[m], r).sum() + cost.overhead());
      best = {d, total - open, open, cap};
      least = alone * d;
    }
    if (best.degree && d == 1) break;
  }
  return best;
}

Shelves::Shelf Shelves::fill(const std::vector<int>& samples, i64 height, int r) const {
  const std::vector<Pack>& packs = table_.request().samples;
  const int m = table_.request().per_node;
  struct Open {
    int first, degree;
    i64 end, room;
    std::vector<int> samples;
  };
  struct Wide {
    int sample;
    Fit fit;
  };
  Shelf shelf;
  shelf.recompute = r;
  std::vector<Wide> wide;
  std::vector<int> small;
  Fit one;
  std::vector<i64> times;
  for (int j : samples) {
    const Fit f = fit(packs[j], height, r);
    if (f.degree == 0) {
      shelf.left.push_back(j);
    } else if (f.degree > 1) {
      wide.push_back({j, f});
    } else {
      one = f;
      small.push_back(j);
      times.push_back(f.time);
    }
  }
  std::stable_sort(wide.begin(), wide.end(),
                   [](const Wide& a, const Wide& b) { return a.fit.degree > b.fit.degree; });
  std::vector<int> used(pieces_.size(), 0);
  std::vector<Open> open;
  for (const Wide& w : wide) {
    const i64 tokens = packs[w.sample].tokens;
    Open* best = nullptr;
    for (Open& o : open)
      if (o.degree == w.fit.degree && o.end + w.fit.time <= height && o.room >= tokens &&
          (!best || o.end > best->end))
        best = &o;
    if (best) {
      best->end += w.fit.time;
      best->room -= tokens;
      best->samples.push_back(w.sample);
      continue;
    }
    const int d = w.fit.degree;
    int first = -1;
    if (d <= m) {
      int tight = -1;
      for (size_t k = 0; k < pieces_.size(); ++k) {
        const int room = pieces_[k].size - used[k];
        if (room >= d && (tight < 0 || room < pieces_[tight].size - used[tight])) tight = int(k);
      }
      if (tight >= 0) {
        first = pieces_[tight].first + used[tight];
        used[tight] += d;
      }
    } else {
      const size_t nodes = size_t(d / m);
      size_t run = 0;
      for (size_t k = 0; k < pieces_.size() && first < 0; ++k) {
        run = used[k] == 0 && pieces_[k].size == m ? run + 1 : 0;
        if (run < nodes) continue;
        first = pieces_[k + 1 - nodes].first;
        for (size_t i = k + 1 - nodes; i <= k; ++i) used[i] = m;
      }
    }
    if (first < 0) {
      shelf.left.push_back(w.sample);
      continue;
    }
    open.push_back({first, d, w.fit.open + w.fit.time, w.fit.cap - tokens, {w.sample}});
  }
  using Entry = std::pair<i64, int>;
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> heap;
  for (size_t k = 0; k < pieces_.size(); ++k) {
    for (int f = pieces_[k].first + used[k]; f < pieces_[k].first + pieces_[k].size; ++f) {
      heap.push({one.open, int(open.size())});
      open.push_back({f, 1, one.open, one.cap, {}});
    }
  }
  std::vector<Entry> aside;
  for (size_t i = 0; i < small.size(); ++i) {
    const i64 tokens = packs[small[i]].tokens;
    bool placed = false;
    aside.clear();
    while (!placed && !heap.empty() && aside.size() < kSetAside) {
      const auto [end, k] = heap.top();
      if (end + times[i] > height) break;
      heap.pop();
      if (open[k].room < tokens) {
        aside.push_back({end, k});
        continue;
      }
      open[k].room -= tokens;
      open[k].end = end + times[i];
      open[k].samples.push_back(small[i]);
      heap.push({open[k].end, k});
      placed = true;
    }
    for (const Entry& e : aside) heap.push(e);
    if (!placed) shelf.left.push_back(small[i]);
  }
  for (size_t k = 0; k < open.size(); ++k) {
    if (open[k].samples.empty()) continue;
    shelf.height = std::max(shelf.height, open[k].end);
    for (int j : open[k].samples) shelf.area += area(packs[j]);
    shelf.blocks.push_back({open[k].first, open[k].degree, std::move(open[k].samples)});
  }
  std::sort(shelf.left.begin(), shelf.left.end());
  return shelf;
}

// One shelf for everything, as low as bisection finds, below `ceiling`.
bool Shelves::close(const std::vector<int>& samples, i64 ceiling, Shelf* out) const {
  double total = 0.0;
  i64 longest = 0;
  for (int j : samples) {
    const Pack& s = table_.request().samples[j];
    total += area(s);
    i64 least = -1;
    for (int d : degrees_) {
      int mode, r;
      const i64 t = table_.best_mode(s, d, -1, &mode, &r);
      if (t >= 0 && (least < 0 || t < least)) least = t;
    }
    longest = std::max(longest, least);
  }
  const i64 start = std::max(longest, i64(total / ranks_));
  bool found = false;
  for (int r : levels_) {
    i64 low = start - 1, high = start;  // low is too low
    Shelf best;
    bool fits = false;
    for (i64 step = std::max<i64>(1, start / 32);; step *= 2) {
      if (high >= ceiling || high > 64 * start) break;
      Shelf s = fill(samples, high, r);
      if (s.left.empty()) {
        best = std::move(s);
        fits = true;
        break;
      }
      low = high;
      high += step;
    }
    while (fits && high - low > std::max<i64>(1, high / 512)) {
      const i64 mid = low + (high - low) / 2;
      Shelf s = fill(samples, mid, r);
      if (s.left.empty()) {
        best = std::move(s);
        high = mid;
      } else {
        low = mid;
      }
    }
    if (fits && best.height < ceiling) {
      ceiling = best.height;
      *out = std::move(best);
      found = true;
    }
  }
  return found;
}

// The shelf of most area per height, among the heights that the longest sample suggests.
bool Shelves::best_shelf(const std::vector<int>& samples, Shelf* out) const {
  const Pack* longest = nullptr;
  for (int j : samples) {
    const Pack& s = table_.request().samples[j];
    if (!longest || area(s) > area(*longest)) longest = &s;
  }
  double best = -1.0;
  for (int d : degrees_) {
    if (d & (d - 1)) continue;
    for (int r : levels_) {
      int mode, used;
      const i64 height = table_.best_mode(*longest, d, r, &mode, &used);
      if (height < 0) continue;
      Shelf s = fill(samples, height, r);
      if (s.height == 0) continue;
      const double rate = s.area / double(s.height);
      if (rate > best) {
        best = rate;
        *out = std::move(s);
      }
    }
  }
  return best >= 0.0;
}

bool Shelves::run(std::vector<int> samples, int slot, std::vector<Placement>* out) const {
  std::vector<Shelf> shelves, best;
  i64 total = 0, best_total = std::numeric_limits<i64>::max();
  for (int k = 0; k < kMaxShelves && !samples.empty() && total < best_total; ++k) {
    Shelf last;
    if (close(samples, best_total - total, &last)) {
      best_total = total + last.height;
      best = shelves;
      best.push_back(last);
    }
    Shelf next;
    if (!best_shelf(samples, &next)) break;
    total += next.height;
    samples = next.left;
    shelves.push_back(std::move(next));
  }
  if (samples.empty() && total < best_total) best = shelves;
  if (best.empty()) return samples.empty();
  for (const Shelf& shelf : best) {
    for (const Block& b : shelf.blocks) {
      Placement p;
      if (!price(table_, b.first, b.degree, shelf.recompute, b.samples, &p)) return false;
      p.slot = slot;
      out->push_back(std::move(p));
    }
    ++slot;
  }
  return true;
}

Plan lockstep_plan(const Table& table, const Bound& bound) {
  const Request& q = table.request();
  const Search search(table);
  Plan best = search.plan(bound);
  std::vector<int> samples = search.order();
  Plan plan;
  if (q.lockstep == q.ranks) {
    if (!Shelves(table, 0, q.ranks).run(samples, 0, &plan.placements)) return best;
  } else {
    // Samples that no domain can hold run first, on windows of their own; the rest is dealt to the
    // domains by work, and every domain stacks its own shelves.
    const int count = q.ranks / q.lockstep;
    std::vector<int> inside;
    std::vector<Block> across;
    search.split(bound.area, q.lockstep, &inside, &across);
    plan = finish(table, across);
    std::vector<int> next(count, 0);
    std::vector<i64> load(count, 0);
    for (const Placement& p : plan.placements) {
      for (int d = p.first / q.lockstep; d <= (p.first + p.degree - 1) / q.lockstep; ++d) {
        next[d] = std::max(next[d], p.slot + 1);
        load[d] += p.time_us * q.lockstep;
      }
    }
    std::vector<std::vector<int>> dealt(count);
    for (int j : inside) {
      const int d = int(std::min_element(load.begin(), load.end()) - load.begin());
      load[d] += search.work(j);
      dealt[d].push_back(j);
    }
    for (int d = 0; d < count; ++d)
      if (!Shelves(table, d * q.lockstep, q.lockstep).run(dealt[d], next[d], &plan.placements))
        return best;
  }
  close_plan(table, &plan);
  plan.algorithm = "shelves";
  return plan.makespan_us < best.makespan_us ? plan : best;
}

}  // namespace mdcp
