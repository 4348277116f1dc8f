// Local search. On degree 1 the slowest rank gives a sample to, or swaps with, one of the fastest;
// small batches also try other degrees for the samples of the slowest rank.
#include <algorithm>

#include "planner/search.h"

namespace mdcp {

namespace {

constexpr int kPartners = 24;  // fastest ranks looked at per step

// A load of a rank; outdated when the rank's stamp has moved on.
struct Entry {
  i64 load;
  int rank, stamp;
  bool operator<(const Entry& o) const { return load != o.load ? load < o.load : rank < o.rank; }
  bool operator>(const Entry& o) const { return o < *this; }
};

}  // namespace

// Moving degree-1 samples cannot go below the wide part, nor below the mean.
bool Search::promising(const Layout& trial, const Layout& best) const {
  const i64 widest = *std::max_element(trial.base.begin(), trial.base.end());
  return std::max(widest, trial.mean) < best.end;
}

// Time of degree-1 samples (decreasing) on one rank: first-fit packs, each opened once.
i64 Search::singles_us(const std::vector<int>& samples, int rank) const {
  i64 total = 0, tokens = 0;
  for (int j : samples) {
    total += time1_[j];
    tokens += q_.samples[j].tokens;
  }
  if (tokens <= cap1_) return scaled(samples.empty() ? 0 : total + open1_, rank, 1);
  std::vector<i64>& room = room_;
  room.clear();
  for (int j : samples) {
    const i64 need = q_.samples[j].tokens;
    size_t b = 0;
    while (b < room.size() && room[b] < need) ++b;
    if (b == room.size()) {
      room.push_back(cap1_);
      total += open1_;
    }
    room[b] -= need;
  }
  return scaled(total, rank, 1);
}

void Search::improve(Layout* out) const {
  const i64 goal = out->mean + out->mean / 2000;
  int budget = int(q_.samples.size() + size_t(q_.ranks)) / 4 + 64;
  // Samples of a rank, in the order of order_: a list through `next`.
  std::vector<int> head(q_.ranks, -1), next(q_.samples.size()), stamp(q_.ranks, 0);
  for (size_t k = order_.size(); k-- > 0;) {
    const int j = order_[k], r = out->rank_of[j];
    if (r < 0) continue;
    next[j] = head[r];
    head[r] = j;
  }
  std::vector<int> mine, theirs, left, right;
  std::vector<i64> times;
  const auto list = [&](int r, std::vector<int>* to) {
    to->clear();
    for (int j = head[r]; j >= 0; j = next[j]) to->push_back(j);
  };
  const auto relink = [&](int r, const std::vector<int>& samples) {
    head[r] = -1;
    for (size_t k = samples.size(); k-- > 0;) {
      next[samples[k]] = head[r];
      head[r] = samples[k];
    }
  };
  // `list` without `drop`, with `add`.
  const auto replaced = [&](const std::vector<int>& from, int drop, int add, std::vector<int>* to) {
    to->clear();
    bool added = add < 0;
    for (int j : from) {
      if (!added && (time1_[add] > time1_[j] || (time1_[add] == time1_[j] && add < j))) {
        to->push_back(add);
        added = true;
      }
      if (j != drop) to->push_back(j);
    }
    if (!added) to->push_back(add);
  };
  std::vector<Entry> slowest, fastest, seen;
  for (int r = 0; r < q_.ranks; ++r) {
    if (head[r] < 0) continue;
    if (!q_.speed.empty()) {  // place_small rounds every sample, a rank rounds once
      list(r, &mine);
      out->load[r] = out->base[r] + singles_us(mine, r);
    }
    slowest.push_back({out->load[r], r, 0});
  }
  fastest = slowest;
  std::make_heap(slowest.begin(), slowest.end());
  std::make_heap(fastest.begin(), fastest.end(), std::greater<>());
  const auto push = [&](int r) {
    const Entry e{out->load[r], r, ++stamp[r]};
    slowest.push_back(e);
    std::push_heap(slowest.begin(), slowest.end());
    fastest.push_back(e);
    std::push_heap(fastest.begin(), fastest.end(), std::greater<>());
  };
  while (budget-- > 0 && !slowest.empty()) {
    while (slowest[0].stamp != stamp[slowest[0].rank]) {
      std::pop_heap(slowest.begin(), slowest.end());
      slowest.pop_back();
    }
    const i64 slow = slowest[0].load;
    const int c = slowest[0].rank;
    if (slow <= goal) break;
    list(c, &mine);
    bool moved = false;
    seen.clear();
    while (!fastest.empty() && seen.size() < kPartners && !moved) {
      std::pop_heap(fastest.begin(), fastest.end(), std::greater<>());
      const Entry e = fastest.back();
      fastest.pop_back();
      const int q = e.rank;
      if (e.stamp != stamp[q]) continue;
      seen.push_back(e);
      if (q == c) break;
      list(q, &theirs);
      times.clear();
      for (int j : theirs) times.push_back(time1_[j]);
      // The exchange whose difference is nearest to half the distance.
      const i64 half = (slow - e.load) / 2;
      i64 best = slow - e.load;
      int give = -1, take = -1;
      for (int i : mine) {
        const i64 t = time1_[i], off = std::abs(t - half);
        if (off < best && off < half && mine.size() > 1) best = off, give = i, take = -1;
        for (size_t k = 0; k < times.size(); ++k) {
          const i64 over = t - times[k] - half;
          if (times[k] >= t) continue;
          const i64 miss = std::abs(over);
          if (miss < best && miss < half) best = miss, give = i, take = theirs[k];
          if (over >= 0) break;  // times fall: the others miss by more
        }
      }
      if (give < 0) continue;
      replaced(mine, give, take, &left);
      replaced(theirs, take, give, &right);
      const i64 a = out->base[c] + singles_us(left, c), b = out->base[q] + singles_us(right, q);
      if (std::max(a, b) >= slow) continue;
      relink(c, left);
      relink(q, right);
      out->rank_of[give] = q;
      if (take >= 0) out->rank_of[take] = c;
      out->load[c] = a;
      out->load[q] = b;
      moved = true;
      seen.pop_back();
      push(c);
      push(q);
    }
    for (const Entry& e : seen) {
      fastest.push_back(e);
      std::push_heap(fastest.begin(), fastest.end(), std::greater<>());
    }
    if (!moved) break;
  }
  out->end = *std::max_element(out->load.begin(), out->load.end());
}

// Tries degrees next to the present one for one sample of the slowest rank after the other and
// keeps the first layout that ends earlier. `budget`: layouts.
void Search::widen(Candidate c, int budget, Layout* best) const {
  Layout trial;
  std::vector<int> forced(q_.samples.size(), 0);
  c.forced = &forced;
  const std::vector<int>& degrees = table_.degrees();
  for (bool better = true; better && budget > 0;) {
    better = false;
    const auto top = std::max_element(best->load.begin(), best->load.end());
    const int slow = int(top - best->load.begin());
    std::vector<std::pair<int, int>> items;  // sample, place of its degree in `degrees`
    for (const Block& b : best->wide) {
      if (slow < b.first || slow >= b.first + b.degree) continue;
      const auto at = std::lower_bound(degrees.begin(), degrees.end(), b.degree);
      for (int j : b.samples) items.push_back({j, int(at - degrees.begin())});
    }
    for (int j : order_)
      if (best->rank_of[j] == slow) items.push_back({j, 0});
    c.target = best->end - best->end / 1000;
    for (size_t k = 0; k < items.size() && !better; ++k) {
      const auto [sample, at] = items[k];
      for (int to : {at + 1, at - 1, at + 2, at - 2}) {
        if (to < 0 || to >= int(degrees.size()) || budget <= 0) continue;
        const int was = forced[sample];
        forced[sample] = degrees[to];
        --budget;
        layout(c, &trial);
        if (promising(trial, *best)) improve(&trial);
        better = trial.end < best->end;
        if (better) {
          std::swap(*best, trial);
          break;
        }
        forced[sample] = was;
      }
    }
  }
}

}  // namespace mdcp
