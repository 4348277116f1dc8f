// One layout of the async search: degrees, wide windows, filled gaps, degree 1 by LPT.
#include <algorithm>

#include "planner/load_heap.h"
#include "planner/search.h"

namespace mdcp {

namespace {

constexpr double kKeep = 0.999;    // a wider block must save a thousandth of the work
constexpr int kMostNarrowed = 64;  // narrow() scans all ranks
// Overheads: the widest gap of a wide window that is filled. Filling costs communication, a pack of
// its own an overhead; a sample on two nodes costs twice its time on one rank.
constexpr i64 kFillGap = 16, kFillGapFew = 32, kFillGapFar = 2;

}  // namespace

// Degree of every sample: the least work that ends within theta * target.
std::vector<Search::Item> Search::choose(const Candidate& c, std::vector<int>* small) const {
  const i64 limit = c.target * c.theta / 1000;
  std::vector<Item> wide;
  const Pack* last = nullptr;
  Item next{};
  for (int j : order_) {
    const Pack& s = q_.samples[j];
    if (c.forced && (*c.forced)[j]) {
      const Option o = table_.on(j, (*c.forced)[j]);
      if (o.degree > 1) {
        wide.push_back(item(j, o));
        continue;
      }
    }
    if (s.tokens <= cap1_ && time1_[j] + open1_ <= limit) {
      small->push_back(j);
      continue;
    }
    if (!last || !(*last == s)) {
      Option o = table_.cheapest(j, double(limit), c.family, kKeep);
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

// Heap of the windows of a degree: aligned (powers), or where the load changes.
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
  std::make_heap(out.begin(), out.end(), [](const Window& a, const Window& b) { return b < a; });
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
  // Without a grid tokens fall as times do: first entry of at most so many.
  const bool falling = q_.profile.pairs != Pairs::grid;
  const auto shortest_within = [&](i64 tokens) {
    const auto longer = [&](int j, i64 t) { return q_.samples[j].tokens > t; };
    return int(std::lower_bound(list.begin(), list.end(), tokens, longer) - list.begin());
  };
  std::vector<bool> used(n, false);
  const i64 widest = i64(q_.samples.size()) <= 2 * q_.ranks ? kFillGapFew : kFillGap;
  // First entry of at most `us` on one rank.
  const auto longest_within = [&](i64 us) {
    const auto longer = [&](int j, i64 t) { return time1_[j] > t; };
    return int(std::lower_bound(list.begin(), list.end(), us, longer) - list.begin());
  };
  for (const Gap& g : gaps) {
    Block& block = out->wide[g.block];
    const int d = block.degree;
    if (g.room <= 0) continue;
    const Mode mode = table_.modes(d)[g.mode];
    i64 end = g.end, room = g.room;
    const auto top = out->load.begin() + block.first;
    if (std::any_of(top, top + d, [&](i64 x) { return x != end; })) continue;
    if (c.target - end > (d > q_.per_node ? kFillGapFar : widest) * open1_) continue;
    const i64 empty = rounded(cost.parts({}, d, mode, 0).sum() + cost.overhead());
    while (c.target > end) {
      // The marginal time at degree d is at least time1 / d.
      const i64 most = (c.target - end) * d;
      int i = longest_within(most);
      i64 t = 0;
      for (i = free(i); i < n; i = free(i + 1)) {
        const Pack& s = q_.samples[list[i]];
        if (s.tokens > room) {
          if (falling) i = std::max(i, shortest_within(room) - 1);
          continue;
        }
        t = rounded(cost.parts(s, d, mode, 0).sum() + cost.overhead()) - empty;
        t = scaled(t, block.first, d);
        if (end + t <= c.target) break;
        // Too long: look on where samples are shorter by as much.
        const double share = double(c.target - end) / double(t);
        const i64 next_most = i64(share * double(time1_[list[i]]));
        const int jump = longest_within(next_most) - 1;
        if (jump > i) i = jump;
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

// Longest processing time first; a rank's packs are filled first-fit. Key: of the heap.
template <class Key>
void Search::place_small(const std::vector<int>& small, Layout* out) const {
  struct Bin {
    i64 room;
    int next;
  };
  std::vector<Bin> bins;
  bins.reserve(small.size());
  std::vector<int> first(q_.ranks, -1), last(q_.ranks, -1);
  LoadHeap<Key> heap(q_.ranks);
  for (int r = 0; r < q_.ranks; ++r) heap.add(out->load[r] + scaled(open1_, r, 1), r);
  heap.order();
  for (int j : small) {
    const int r = heap.id();
    i64 load = heap.load() + scaled(time1_[j], r, 1);
    const i64 tokens = q_.samples[j].tokens;
    int b = first[r];
    while (b >= 0 && bins[b].room < tokens) b = bins[b].next;
    if (b < 0) {
      b = int(bins.size());
      bins.push_back({cap1_, -1});
      if (first[r] < 0) {
        first[r] = b;
      } else {
        bins[last[r]].next = b;
        load += scaled(open1_, r, 1);
      }
      last[r] = b;
    }
    bins[b].room -= tokens;
    out->rank_of[j] = r;
    out->load[r] = load;
    heap.replace(load);
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
  i64 most = *std::max_element(out->load.begin(), out->load.end()) + open1_;
  for (int j : small) most += time1_[j] + open1_;
  if (q_.speed.empty() && fits_64(most, q_.ranks))
    place_small<std::uint64_t>(small, out);
  else
    place_small<unsigned __int128>(small, out);
  out->end = *std::max_element(out->load.begin(), out->load.end());
  i64 total = 0;
  for (i64 x : out->load) total += x;
  out->mean = total / q_.ranks;
}

}  // namespace mdcp
