#include "planner/shelves.h"

#include <algorithm>
#include <queue>

#include "planner/search.h"

namespace mdcp {

namespace {

constexpr int kMaxShelves = 4096;
constexpr int kSetAside = 8;  // ranks out of tokens that one sample may pass over

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
  for (int k = 0; k <= (q.recompute ? 8 : 0); ++k) {
    const int r = layers * k / 8;
    if (levels_.empty() || levels_.back() != r) levels_.push_back(r);
  }
}

// Degree of least work that ends inside the height with exactly this recompute.
Shelves::Fit Shelves::fit(int sample, i64 height, int r) const {
  const Pack& s = table_.request().samples[sample];
  const Cost& cost = table_.cost();
  Fit best;
  double least = 0.0;
  const Profile& p = cost.profile();
  const double share = double(r) / cost.layers();
  const double again = 1.0 + std::min(p.again_linear, p.again_attention) * share;
  const double floor = table_.area(sample) * again * (1.0 - 1e-9);
  for (int d : degrees_) {
    if (floor > double(height) * d) continue;
    if (best.degree && floor + double(s.tokens) * table_.wire_from(d) >= least) break;
    const std::vector<Mode>& modes = table_.modes(d);
    for (int m = 0; m < int(modes.size()); ++m) {
      const i64 cap = table_.cap(d, m, r);
      if (s.tokens > cap) continue;
      const double alone = cost.parts(s, d, modes[m], r).sum();
      const i64 total = rounded(alone + cost.overhead());
      if (total > height || (best.degree && alone * d >= least)) continue;
      const i64 open = rounded(cost.parts({}, d, modes[m], r).sum() + cost.overhead());
      best = {d, m, total - open, open, cap};
      least = alone * d;
    }
    if (best.degree && d == 1) break;
  }
  return best;
}

int Shelves::allocate(int d, std::vector<int>* used) const {
  const int m = table_.request().per_node;
  if (d <= m) {
    int tight = -1, least = 0;
    for (size_t k = 0; k < pieces_.size(); ++k) {
      const int room = pieces_[k].size - (*used)[k];
      if (room >= d && (tight < 0 || room < least)) tight = int(k), least = room;
    }
    if (tight < 0) return -1;
    (*used)[tight] += d;
    return pieces_[tight].first + (*used)[tight] - d;
  }
  const size_t nodes = size_t(d / m);
  size_t run = 0;
  for (size_t k = 0; k < pieces_.size(); ++k) {
    run = (*used)[k] == 0 && pieces_[k].size == m ? run + 1 : 0;
    if (run < nodes) continue;
    for (size_t i = k + 1 - nodes; i <= k; ++i) (*used)[i] = m;
    return pieces_[k + 1 - nodes].first;
  }
  return -1;
}

// Widest first; of the open blocks of the same degree the fullest with room, else a new block.
void Shelves::place_wide(const std::vector<Wide>& wide, i64 height, std::vector<int>* used,
                         std::vector<Open>* open, std::vector<int>* left) const {
  for (const Wide& w : wide) {
    const i64 tokens = table_.request().samples[w.sample].tokens;
    Open* best = nullptr;
    for (Open& o : *open)
      if (o.degree == w.fit.degree && o.end + w.fit.time <= height && o.room >= tokens &&
          (!best || o.end > best->end))
        best = &o;
    if (best) {
      best->end += w.fit.time;
      best->room -= tokens;
      best->samples.push_back(w.sample);
      continue;
    }
    const Fit& f = w.fit;
    const int first = allocate(f.degree, used);
    if (first < 0)
      left->push_back(w.sample);
    else
      open->push_back({first, f.degree, f.mode, f.open + f.time, f.cap - tokens, {w.sample}});
  }
}

// A rank runs one placement per shelf, so short samples must join the wide blocks: largest first
// that still ends inside the height.
void Shelves::fill_gaps(i64 height, int r, std::vector<Small>* small,
                        std::vector<Open>* open) const {
  const Cost& cost = table_.cost();
  std::vector<Small>& list = *small;
  const int n = int(list.size());
  std::vector<int> next(n + 1);
  for (int i = 0; i <= n; ++i) next[i] = i;
  const auto free = [&](int i) {
    while (next[i] != i) i = next[i] = next[next[i]];
    return i;
  };
  for (Open& o : *open) {
    if (o.degree > table_.request().per_node) continue;
    const Mode mode = table_.modes(o.degree)[o.mode];
    const i64 empty = rounded(cost.parts({}, o.degree, mode, r).sum() + cost.overhead());
    while (o.end < height) {
      const i64 most = (height - o.end) * o.degree;
      int i = int(std::lower_bound(list.begin(), list.end(), most,
                                   [](const Small& x, i64 t) { return x.time > t; }) -
                  list.begin());
      i64 t = 0;
      for (i = free(i); i < n; i = free(i + 1)) {
        const Pack& s = table_.request().samples[list[i].sample];
        if (s.tokens > o.room) continue;
        t = rounded(cost.parts(s, o.degree, mode, r).sum() + cost.overhead()) - empty;
        if (o.end + t <= height) break;
      }
      if (i >= n) break;
      o.end += t;
      o.room -= table_.request().samples[list[i].sample].tokens;
      o.samples.push_back(list[i].sample);
      list[i].sample = -1;
      next[i] = i + 1;
    }
  }
  std::erase_if(list, [](const Small& x) { return x.sample < 0; });
}

// Longest processing time first onto the ranks that are left; ranks out of tokens are passed over.
void Shelves::place_small(const std::vector<Small>& small, const Fit& one, i64 height,
                          const std::vector<int>& used, std::vector<Open>* open,
                          std::vector<int>* left) const {
  using Entry = std::pair<i64, int>;
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> heap;
  for (size_t k = 0; k < pieces_.size(); ++k) {
    for (int f = pieces_[k].first + used[k]; f < pieces_[k].first + pieces_[k].size; ++f) {
      heap.push({one.open, int(open->size())});
      open->push_back({f, 1, one.mode, one.open, one.cap, {}});
    }
  }
  std::vector<Entry> aside;
  for (const Small& x : small) {
    const i64 tokens = table_.request().samples[x.sample].tokens;
    bool placed = false;
    aside.clear();
    while (!placed && !heap.empty() && aside.size() < kSetAside) {
      const Entry top = heap.top();
      if (top.first + x.time > height) break;
      heap.pop();
      Open& o = (*open)[top.second];
      if (o.room < tokens) {
        aside.push_back(top);
        continue;
      }
      o.room -= tokens;
      o.end = top.first + x.time;
      o.samples.push_back(x.sample);
      heap.push({o.end, top.second});
      placed = true;
    }
    for (const Entry& e : aside) heap.push(e);
    if (!placed) left->push_back(x.sample);
  }
}

Shelves::Shelf Shelves::fill(const std::vector<int>& samples, i64 height, int r) const {
  Shelf shelf;
  shelf.recompute = r;
  std::vector<Wide> wide;
  std::vector<Small> small;
  Fit one;
  for (int j : samples) {
    const Fit f = fit(j, height, r);
    if (f.degree == 0) {
      shelf.left.push_back(j);
    } else if (f.degree > 1) {
      wide.push_back({j, f});
    } else {
      one = f;
      small.push_back({j, f.time});
    }
  }
  std::stable_sort(wide.begin(), wide.end(),
                   [](const Wide& a, const Wide& b) { return a.fit.degree > b.fit.degree; });
  std::vector<int> used(pieces_.size(), 0);
  std::vector<Open> open;
  place_wide(wide, height, &used, &open, &shelf.left);
  fill_gaps(height, r, &small, &open);
  place_small(small, one, height, used, &open, &shelf.left);
  for (Open& o : open) {
    if (o.samples.empty()) continue;
    shelf.height = std::max(shelf.height, o.end);
    for (int j : o.samples) shelf.area += table_.area(j);
    shelf.blocks.push_back({o.first, o.degree, std::move(o.samples)});
  }
  // `left` keeps the order of `samples`: decreasing time.
  std::sort(shelf.left.begin(), shelf.left.end(), [&](int a, int b) {
    return table_.area(a) != table_.area(b) ? table_.area(a) > table_.area(b) : a < b;
  });
  return shelf;
}

// One shelf for everything, as low as bisection finds, below `ceiling`.
bool Shelves::close(const std::vector<int>& samples, i64 ceiling, Shelf* out) const {
  double total = 0.0;
  i64 longest = 0, tokens = 0;
  for (int j : samples) {
    const Pack& s = table_.request().samples[j];
    tokens += s.tokens;
    total += table_.area(j);
    i64 least = -1;
    for (int d : degrees_) {
      int mode, r;
      const i64 t = table_.best_mode(s, d, -1, &mode, &r);
      if (t >= 0 && (least < 0 || t < least)) least = t;
    }
    longest = std::max(longest, least);
  }
  const Profile& p = table_.cost().profile();
  bool found = false;
  int misses = 0;
  for (int r : levels_) {
    if (tokens > table_.cap(1, 0, r) * ranks_) continue;  // no shelf holds so many
    if (misses >= 2) break;
    // Every placement of the shelf pays for exactly this recompute.
    const double share = double(r) / table_.cost().layers();
    const double again = 1.0 + std::min(p.again_linear, p.again_attention) * share;
    const i64 start = std::max(longest, i64(total * again / ranks_ + table_.cost().overhead()));
    i64 low = start - 1, high = start;  // low is too low
    Shelf best;
    bool fits = false;
    for (i64 step = std::max<i64>(1, start / 64);; step *= 2) {
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
      misses = 0;
    } else if (found) {
      ++misses;
    }
  }
  return found;
}

// The shelf of most area per height, among the heights that the longest sample suggests.
bool Shelves::best_shelf(const std::vector<int>& samples, Shelf* out) const {
  int most = samples[0];
  double total = 0.0;
  const double overhead = table_.cost().overhead();
  for (int j : samples) {
    total += table_.area(j);
    if (table_.area(j) > table_.area(most)) most = j;
  }
  const Pack& longest = table_.request().samples[most];
  double best = -1.0;
  i64 lowest = -1;
  for (int d : degrees_) {
    int mode, used;
    const i64 height = d & (d - 1) ? -1 : table_.best_mode(longest, d, -1, &mode, &used);
    if (height >= 0 && (lowest < 0 || height < lowest)) lowest = height;
  }
  for (int d : degrees_) {
    if (d & (d - 1)) continue;
    for (int r : {levels_.front(), levels_[levels_.size() / 2], levels_.back()}) {
      int mode, used;
      const i64 height = table_.best_mode(longest, d, r, &mode, &used);
      if (height < 0 || height > 12 * lowest) continue;
      const double most_area = std::min(total, (double(height) - overhead) * ranks_);
      if (most_area <= best * double(height)) continue;
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
    // Two more shelves cost at least two overheads and the area.
    double rest = 2.0 * table_.cost().overhead();
    for (int j : samples) rest += table_.area(j) / ranks_;
    if (double(total) + rest >= double(best_total)) break;
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
