#include "planner/shelves.h"

#include <algorithm>

#include "planner/load_heap.h"
#include "planner/search.h"

namespace mdcp {

namespace {

constexpr int kMaxShelves = 4096;
constexpr int kSetAside = 8;     // ranks out of tokens that one sample may pass over
constexpr int kLevels = 16;      // recompute values: parts of the layers
constexpr int kCoarse = 4;       // levels between those that the next shelf tries
constexpr int kMostDealt = 3;    // shelves that what is left is dealt to
constexpr double kKeep = 0.999;  // a wider block must save a thousandth of the work

}  // namespace

const Singles::Level& Singles::at(int r) const {
  Level& level = levels_[r];
  if (!level.time.empty()) return level;
  const Cost& cost = table_.cost();
  const Mode local{Scheme::local, 1};
  level.open = rounded(cost.parts({}, 1, local, r).sum() + cost.overhead());
  level.cap = table_.cap(1, 0, r);
  for (const Pack& s : table_.request().samples)
    level.time.push_back(rounded(cost.parts(s, 1, local, r).sum() + cost.overhead()) - level.open);
  return level;
}

Shelves::Shelves(const Table& table, const Singles& singles, int first, int ranks)
    : table_(table), singles_(singles), ranks_(ranks) {
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
  for (int k = 0; k <= (q.recompute ? kLevels : 0); ++k) {
    const int r = layers * k / kLevels;
    if (levels_.empty() || levels_.back() != r) levels_.push_back(r);
  }
}

double Shelves::again(int r) const {
  const Profile& p = table_.cost().profile();
  return 1.0 + std::min(p.again_linear, p.again_attention) * (double(r) / table_.cost().layers());
}

// Degree of least work that ends inside the height with exactly this recompute.
Shelves::Fit Shelves::fit(int sample, i64 height, int r) const {
  const Pack& s = table_.request().samples[sample];
  const Cost& cost = table_.cost();
  Fit best;
  double least = 0.0;
  const double floor = table_.area(sample) * again(r) * (1.0 - 1e-9);
  for (int d : degrees_) {
    if (floor > double(height) * d) continue;
    if (best.degree && floor + double(s.tokens) * table_.wire_from(d) >= least * kKeep) break;
    const std::vector<Mode>& modes = table_.modes(d);
    for (int m = 0; m < int(modes.size()); ++m) {
      const i64 cap = table_.cap(d, m, r);
      if (s.tokens > cap) continue;
      const double alone = cost.parts(s, d, modes[m], r).sum();
      const i64 total = rounded(alone + cost.overhead());
      if (total > height || (best.degree && alone * d >= least * kKeep)) continue;
      const i64 open = rounded(cost.parts({}, d, modes[m], r).sum() + cost.overhead());
      best = {d, m, total - open, open, cap};
      least = alone * d;
    }
    if (best.degree && d == 1) break;
  }
  return best;
}

i64 Shelves::fastest(int sample) const {
  i64 least = -1;
  for (int d : degrees_) {
    int mode, r;
    const i64 t = table_.best_mode(table_.request().samples[sample], d, -1, &mode, &r);
    if (t >= 0 && (least < 0 || t < least)) least = t;
  }
  return least;
}

Shelves::Load Shelves::load(const std::vector<int>& samples) const {
  Load out;
  for (int j : samples) {
    out.area += table_.area(j);
    out.tokens += table_.request().samples[j].tokens;
  }
  return out;
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
  size_t from = 0;  // first block of this degree
  for (size_t i = 0; i < wide.size(); ++i) {
    const Wide& w = wide[i];
    const Fit& f = w.fit;
    if (i > 0 && wide[i - 1].fit.degree != f.degree) from = open->size();
    const i64 tokens = table_.request().samples[w.sample].tokens;
    Open* best = nullptr;
    for (size_t k = from; k < open->size(); ++k) {
      Open& o = (*open)[k];
      if (o.end + f.time <= height && o.room >= tokens && (!best || o.end > best->end)) best = &o;
    }
    if (best) {
      best->end += f.time;
      best->room -= tokens;
      best->samples.push_back(w.sample);
      continue;
    }
    const int first = allocate(f.degree, used);
    if (first < 0)
      left->push_back(w.sample);
    else
      open->push_back({first, f.degree, f.mode, f.open + f.time, f.cap - tokens, {w.sample}});
  }
}

// A rank runs one placement per shelf, so short samples must join the wide blocks: largest first
// that still ends inside the height.
void Shelves::fill_gaps(i64 height, int r, std::vector<int>* small, std::vector<Open>* open) const {
  const Cost& cost = table_.cost();
  const std::vector<i64>& time = singles_.at(r).time;
  std::vector<int>& list = *small;
  const int n = int(list.size());
  std::vector<int> next(n + 1);
  for (int i = 0; i <= n; ++i) next[i] = i;
  const auto free = [&](int i) {
    while (next[i] != i) i = next[i] = next[next[i]];
    return i;
  };
  // First entry of at most `us` on one rank.
  const auto longest_within = [&](i64 us) {
    const auto longer = [&](int j, i64 t) { return time[j] > t; };
    return int(std::lower_bound(list.begin(), list.end(), us, longer) - list.begin());
  };
  // Without a grid tokens fall as times do: first entry of at most so many.
  const bool falling = table_.request().profile.pairs != Pairs::grid;
  const auto shortest_within = [&](i64 tokens) {
    const auto longer = [&](int j, i64 t) { return table_.request().samples[j].tokens > t; };
    return int(std::lower_bound(list.begin(), list.end(), tokens, longer) - list.begin());
  };
  std::vector<bool> used(n, false);
  for (Open& o : *open) {
    if (o.degree > table_.request().per_node) continue;
    const Mode mode = table_.modes(o.degree)[o.mode];
    const i64 empty = rounded(cost.parts({}, o.degree, mode, r).sum() + cost.overhead());
    while (o.end < height) {
      int i = longest_within((height - o.end) * o.degree);
      i64 t = 0;
      for (i = free(i); i < n; i = free(i + 1)) {
        const Pack& s = table_.request().samples[list[i]];
        if (s.tokens > o.room) {
          if (falling) i = std::max(i, shortest_within(o.room) - 1);
          continue;
        }
        t = rounded(cost.parts(s, o.degree, mode, r).sum() + cost.overhead()) - empty;
        if (o.end + t <= height) break;
        // Too long: look on where samples are shorter by as much.
        const double share = double(height - o.end) / double(t);
        const int jump = longest_within(i64(share * double(time[list[i]]))) - 1;
        if (jump > i) i = jump;
      }
      if (i >= n) break;
      o.end += t;
      o.room -= table_.request().samples[list[i]].tokens;
      o.samples.push_back(list[i]);
      used[i] = true;
      next[i] = i + 1;
    }
  }
  size_t kept = 0;
  for (int i = 0; i < n; ++i)
    if (!used[i]) list[kept++] = list[i];
  list.resize(kept);
}

// Longest processing time first onto the ranks that are left; ranks out of tokens are passed over.
template <class Key>
void Shelves::place_small(const std::vector<int>& small, int r, i64 height,
                          const std::vector<int>& used, bool whole, std::vector<Open>* open,
                          std::vector<int>* left) const {
  const Singles::Level& one = singles_.at(r);
  const std::vector<Pack>& samples = table_.request().samples;
  const size_t wide = open->size();
  for (size_t k = 0; k < pieces_.size(); ++k)
    for (int f = pieces_[k].first + used[k]; f < pieces_[k].first + pieces_[k].size; ++f)
      open->push_back({f, 1, 0, one.open, one.cap, {}});
  LoadHeap<Key> heap(int(open->size()));
  for (size_t k = wide; k < open->size(); ++k) heap.add(one.open, int(k));
  heap.order();
  std::vector<std::pair<i64, int>> aside;  // ranks out of tokens for the present sample
  for (int j : small) {
    bool placed = false;
    aside.clear();
    while (!placed && !heap.empty() && aside.size() < kSetAside) {
      if (heap.load() + one.time[j] > height) break;
      Open& o = (*open)[heap.id()];
      placed = o.room >= samples[j].tokens;
      if (!placed) {
        aside.push_back({heap.load(), heap.id()});
        heap.pop();
        continue;
      }
      o.room -= samples[j].tokens;
      o.end = heap.load() + one.time[j];
      o.samples.push_back(j);
      heap.replace(o.end);
    }
    for (const auto& [load, id] : aside) heap.push(load, id);
    if (placed) continue;
    left->push_back(j);
    if (whole) return;
  }
}

bool Shelves::fill(const std::vector<int>& samples, i64 height, int r, bool whole,
                   Shelf* shelf) const {
  *shelf = {};
  shelf->recompute = r;
  const Singles::Level& one = singles_.at(r);
  std::vector<Wide> wide;
  std::vector<int> small;
  for (int j : samples) {
    if (one.time[j] + one.open <= height && table_.request().samples[j].tokens <= one.cap) {
      small.push_back(j);
      continue;
    }
    const Fit f = fit(j, height, r);
    if (f.degree > 0)
      wide.push_back({j, f});
    else
      shelf->left.push_back(j);
    if (whole && !shelf->left.empty()) return false;
  }
  std::stable_sort(wide.begin(), wide.end(),
                   [](const Wide& a, const Wide& b) { return a.fit.degree > b.fit.degree; });
  const auto longer = [&](int a, int b) { return one.time[a] > one.time[b]; };
  if (!std::is_sorted(small.begin(), small.end(), longer))
    std::stable_sort(small.begin(), small.end(), longer);
  std::vector<int> used(pieces_.size(), 0);
  std::vector<Open> open;
  place_wide(wide, height, &used, &open, &shelf->left);
  if (whole && !shelf->left.empty()) return false;
  fill_gaps(height, r, &small, &open);
  if (fits_64(height, ranks_))
    place_small<std::uint64_t>(small, r, height, used, whole, &open, &shelf->left);
  else
    place_small<unsigned __int128>(small, r, height, used, whole, &open, &shelf->left);
  if (whole && !shelf->left.empty()) return false;
  for (Open& o : open) {
    if (o.samples.empty()) continue;
    shelf->height = std::max(shelf->height, o.end);
    shelf->busy += (double(o.end) - table_.cost().overhead()) * o.degree / again(r);
    for (int j : o.samples) shelf->area += table_.area(j);
    shelf->blocks.push_back({o.first, o.degree, std::move(o.samples)});
  }
  // `left` keeps the order of `samples`: falling area.
  std::sort(shelf->left.begin(), shelf->left.end(), [&](int a, int b) {
    return table_.area(a) != table_.area(b) ? table_.area(a) > table_.area(b) : a < b;
  });
  return true;
}

// One shelf for everything, as low as bisection finds, below `ceiling`.
bool Shelves::close(const std::vector<int>& samples, i64 ceiling, Shelf* out) const {
  const Load all = load(samples);
  const i64 longest = fastest(samples[0]);
  bool found = false;
  int misses = 0;
  Shelf trial;
  for (int r : levels_) {
    if (all.tokens > singles_.at(r).cap * ranks_) continue;  // no shelf holds so many
    if (misses >= 2) break;
    // Every placement of the shelf pays for exactly this recompute.
    const i64 mean = i64(all.area * again(r) / ranks_ + table_.cost().overhead());
    const i64 start = std::max(longest, mean);
    i64 low = start - 1, high = start;  // low is too low
    Shelf best;
    bool fits = false;
    for (i64 step = std::max<i64>(1, start / 64); high < ceiling && high <= 64 * start; step *= 2) {
      fits = fill(samples, high, r, true, &best);
      if (fits) break;
      low = high;
      high += step;
    }
    while (fits && high - low > std::max<i64>(1, high / 256)) {
      const i64 mid = low + (high - low) / 2;
      if (fill(samples, mid, r, true, &trial)) {
        std::swap(best, trial);
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

// What `all` takes at least in `count` shelves: the recompute that memory forces, and overheads.
// Infinite when no recompute fits.
double Shelves::estimate(const Load& all, i64 count) const {
  for (int r : levels_)
    if (all.tokens <= singles_.at(r).cap * ranks_ * count)
      return all.area * again(r) / ranks_ + table_.cost().overhead() * double(count);
  return std::numeric_limits<double>::infinity();
}

double Shelves::estimate(const Load& all) const {
  if (all.tokens == 0) return 0.0;
  double least = std::numeric_limits<double>::infinity();
  const i64 most = std::max<i64>(1, singles_.at(levels_.back()).cap * ranks_);
  const i64 fewest = all.tokens / most + 1;
  for (i64 count = fewest; count <= fewest + kMostDealt; ++count)
    least = std::min(least, estimate(all, count));
  return least;
}

// Closes with several shelves: samples are dealt in turn, so that every shelf holds long and short
// ones alike and needs the same recompute.
bool Shelves::deal(const std::vector<int>& samples, i64 ceiling, std::vector<Shelf>* out) const {
  const Load all = load(samples);
  bool found = false;
  for (int count = 2; count <= kMostDealt && count <= int(samples.size()); ++count) {
    if (estimate(all, count) >= double(ceiling)) continue;
    std::vector<Shelf> shelves;
    i64 total = 0;
    for (int k = 0; k < count && total < ceiling; ++k) {
      std::vector<int> part;
      for (size_t i = size_t(k); i < samples.size(); i += size_t(count)) part.push_back(samples[i]);
      Shelf shelf;
      if (!close(part, ceiling - total, &shelf)) break;
      total += shelf.height;
      shelves.push_back(std::move(shelf));
      // The parts are alike.
      if (total * count >= ceiling * (k + 1)) break;
    }
    if (int(shelves.size()) < count || total >= ceiling) continue;
    ceiling = total;
    *out = std::move(shelves);
    found = true;
  }
  return found;
}

// The shelf of most worth per height. Heights are those that the longest sample suggests. Worth:
// `wide` counts what ranks spend on communication, else only what they would spend alone.
bool Shelves::best_shelf(const std::vector<int>& samples, bool wide, Shelf* out) const {
  const Pack& longest = table_.request().samples[samples[0]];
  const double overhead = table_.cost().overhead();
  const i64 lowest = fastest(samples[0]);
  double best = -1.0;
  Shelf trial;
  for (int d : degrees_) {
    if (d & (d - 1)) continue;
    for (size_t k = 0; k < levels_.size(); k += kCoarse) {
      const int r = levels_[k];
      int mode, used;
      const i64 height = table_.best_mode(longest, d, r, &mode, &used);
      if (height < 0 || height > 12 * lowest) continue;
      if ((double(height) - overhead) / again(r) <= best * double(height)) continue;
      fill(samples, height, r, false, &trial);
      if (trial.height == 0) continue;
      const double rate = (wide ? trial.busy : trial.area) / (double(trial.height) * ranks_);
      if (rate > best) {
        best = rate;
        std::swap(*out, trial);
      }
    }
  }
  return best >= 0.0;
}

// Shelf after shelf, and at every step what is left in one more; then what the best of these leaves
// to its last shelf in several. Replaces `best` where that is lower.
void Shelves::stack(std::vector<int> samples, bool wide, Stack* best) const {
  Stack now;
  now.total = 0;
  std::vector<int> last;
  size_t kept = 0;
  for (int k = 0; k < kMaxShelves && !samples.empty() && now.total < best->total; ++k) {
    Shelf shelf;
    if (!(wide && k == 0) && close(samples, best->total - now.total, &shelf)) {
      last = samples;
      kept = now.shelves.size();
      *best = now;
      best->total += shelf.height;
      best->shelves.push_back(std::move(shelf));
    }
    if (double(now.total) + estimate(load(samples)) >= double(best->total)) break;
    if (!best_shelf(samples, wide, &shelf)) break;
    now.total += shelf.height;
    samples = shelf.left;
    now.shelves.push_back(std::move(shelf));
  }
  if (samples.empty() && now.total < best->total) {
    *best = std::move(now);
    last.clear();
  }
  if (last.empty()) return;
  std::vector<Shelf> several;
  const i64 height = best->shelves.back().height;
  if (!deal(last, height, &several)) return;
  best->total -= height;
  best->shelves.resize(kept);
  for (Shelf& shelf : several) {
    best->total += shelf.height;
    best->shelves.push_back(std::move(shelf));
  }
}

bool Shelves::run(const std::vector<int>& samples, int slot, std::vector<Placement>* out) const {
  Stack best;
  for (const bool wide : {false, true}) stack(samples, wide, &best);
  if (best.shelves.empty()) return samples.empty();
  for (const Shelf& shelf : best.shelves) {
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

namespace {

// Samples that no domain can hold run first, on windows of their own; the rest is dealt to the
// domains by work, and every domain stacks its own shelves. False: a domain cannot hold its
// samples.
bool stack_domains(const Table& table, const Search& search, const Singles& singles, i64 target,
                   Plan* plan) {
  const Request& q = table.request();
  const int count = q.ranks / q.lockstep;
  std::vector<int> inside;
  std::vector<Block> across;
  search.split(target, q.lockstep, &inside, &across);
  *plan = finish(table, across);
  std::vector<int> next(count, 0);
  std::vector<i64> load(count, 0);
  for (const Placement& p : plan->placements) {
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
    if (!Shelves(table, singles, d * q.lockstep, q.lockstep)
             .run(dealt[d], next[d], &plan->placements))
      return false;
  return true;
}

}  // namespace

Plan lockstep_plan(const Table& table, const Bound& bound) {
  const Request& q = table.request();
  const Search search(table);
  const Singles singles(table);
  const bool all = q.lockstep == q.ranks;
  Plan plan;
  const bool stacked =
      all ? Shelves(table, singles, 0, q.ranks).run(search.order(), 0, &plan.placements)
          : stack_domains(table, search, singles, bound.area, &plan);
  plan.algorithm = "shelves";
  if (stacked) close_plan(table, &plan);
  if (stacked && all) return plan;
  // Domains are nearly async: the search may be faster than shelves.
  Plan other = search.plan(bound);
  return stacked && plan.makespan_us < other.makespan_us ? plan : other;
}

}  // namespace mdcp
