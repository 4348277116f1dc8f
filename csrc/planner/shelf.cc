// Filling one shelf: which block every sample gets inside a height.
#include <algorithm>

#include "planner/load_heap.h"
#include "planner/shelves.h"

namespace mdcp {

namespace {

constexpr int kSetAside = 8;     // ranks out of tokens that one sample may pass over
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

Singles::Singles(const Table& table) : table_(table), levels_(table.cost().layers() + 1) {
  by_area_.resize(table.request().samples.size());
  for (size_t j = 0; j < by_area_.size(); ++j) by_area_[j] = int(j);
  std::sort(by_area_.begin(), by_area_.end(), [&](int a, int b) {
    return table.area(a) != table.area(b) ? table.area(a) > table.area(b) : a < b;
  });
  place_.resize(by_area_.size());
  for (size_t k = 0; k < by_area_.size(); ++k) place_[by_area_[k]] = int(k);
}

void Singles::sort_by_area(std::vector<int>* samples) const {
  std::vector<std::uint64_t> marks(place_.size() / 64 + 1, 0);
  for (int j : *samples) marks[place_[j] / 64] |= std::uint64_t(1) << (place_[j] % 64);
  samples->clear();
  for (size_t w = 0; w < marks.size(); ++w)
    for (std::uint64_t left = marks[w]; left; left &= left - 1)
      samples->push_back(by_area_[w * 64 + size_t(std::countr_zero(left))]);
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

int Shelves::allocate(int d, size_t* skip, std::vector<int>* used) const {
  const int m = table_.request().per_node;
  if (d <= m) {
    int tight = -1, least = 0;
    while (*skip < pieces_.size() && pieces_[*skip].size - (*used)[*skip] < d) ++*skip;
    for (size_t k = *skip; k < pieces_.size(); ++k) {
      const int room = pieces_[k].size - (*used)[k];
      if (room >= d && (tight < 0 || room < least)) tight = int(k), least = room;
      // No tighter one follows: whole nodes are taken from the left.
      if (least == d || (room == m && whole_nodes_)) break;
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
  size_t from = 0, skip = 0;  // first block of this degree; pieces too full for it
  int refused = ranks_ + 1;
  for (size_t i = 0; i < wide.size(); ++i) {
    const Wide& w = wide[i];
    const Fit& f = w.fit;
    if (i > 0 && wide[i - 1].fit.degree != f.degree) from = open->size(), skip = 0;
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
    // Ranks are only taken: where no block of a degree was free none is later.
    const int first = f.degree >= refused ? -1 : allocate(f.degree, &skip, used);
    if (first < 0) {
      refused = f.degree;
      left->push_back(w.sample);
      continue;
    }
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
  if (whole) {  // give up at once where even perfect balance leaves samples
    i64 time = 0, tokens = 0;
    for (int j : small) {
      time += one.time[j];
      tokens += samples[j].tokens;
    }
    const i64 bins = i64(open->size() - wide);
    const i64 each = std::max<i64>(0, height - one.open);
    if (time > __int128(each) * bins || tokens > one.cap * bins) {
      left->push_back(small[0]);
      return;
    }
  }
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
  singles_.sort_by_area(&shelf->left);
  return true;
}

}  // namespace mdcp
