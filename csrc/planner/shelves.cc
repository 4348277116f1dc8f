#include "planner/shelves.h"

#include <algorithm>

#include "planner/search.h"

namespace mdcp {

namespace {

constexpr int kMaxShelves = 4096;
constexpr int kLevels = 16;    // recompute values: parts of the layers
constexpr int kCoarse = 4;     // levels between those that the next shelf tries
constexpr int kMostDealt = 3;  // shelves that what is left is dealt to

}  // namespace

Shelves::Shelves(const Table& table, const Singles& singles, int first, int ranks)
    : table_(table), singles_(singles), ranks_(ranks) {
  const Request& q = table.request();
  const int m = q.per_node;
  int widest = 0;
  for (int f = first; f < first + ranks;) {
    const int size = std::min(first + ranks, (f / m + 1) * m) - f;
    pieces_.push_back({f, size});
    whole_nodes_ = whole_nodes_ && size == m;
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

// Every block of the shelf with exactly `r` recomputed layers; the height, -1: one does not fit.
i64 Shelves::price_blocks(const Shelf& shelf, int r, std::vector<Placement>* out) const {
  i64 height = 0;
  out->clear();
  for (const Block& b : shelf.blocks) {
    Placement p;
    if (!price(table_, b.first, b.degree, r, b.samples, &p)) return -1;
    height = std::max(height, p.time_us);
    out->push_back(std::move(p));
  }
  return height;
}

// A shelf was filled for one of a few recompute values; its blocks may need less.
bool Shelves::settle(const Shelf& shelf, std::vector<Placement>* out) const {
  int least = 0;
  for (const Block& b : shelf.blocks) {
    int mode = 0, r = 0;
    table_.best_mode(sum(table_.request(), b.samples), b.degree, -1, &mode, &r);
    least = std::max(least, r);
  }
  const i64 height = price_blocks(shelf, shelf.recompute, out);
  if (least >= shelf.recompute) return height >= 0;
  std::vector<Placement> lean;
  const i64 lower = price_blocks(shelf, least, &lean);
  if (lower >= 0 && (height < 0 || lower <= height)) out->swap(lean);
  return height >= 0 || lower >= 0;
}

bool Shelves::run(const std::vector<int>& samples, int slot, std::vector<Placement>* out) const {
  Stack best;
  for (const bool wide : {false, true}) stack(samples, wide, &best);
  if (best.shelves.empty()) return samples.empty();
  for (const Shelf& shelf : best.shelves) {
    std::vector<Placement> placed;
    if (!settle(shelf, &placed)) return false;
    for (Placement& p : placed) {
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
