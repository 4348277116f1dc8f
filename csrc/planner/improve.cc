// Local search on degree 1: the slowest rank gives a sample to, or swaps with, one of the fastest.
#include <algorithm>
#include <set>

#include "planner/search.h"

namespace mdcp {

namespace {

constexpr int kPartners = 24;  // fastest ranks looked at per step

}  // namespace

// Time of degree-1 samples (decreasing) on one rank: first-fit packs, each opened once.
i64 Search::singles_us(const std::vector<int>& samples, int rank) const {
  i64 total = 0;
  std::vector<i64> room;
  for (int j : samples) {
    const i64 tokens = q_.samples[j].tokens;
    size_t b = 0;
    while (b < room.size() && room[b] < tokens) ++b;
    if (b == room.size()) {
      room.push_back(cap1_);
      total += open1_;
    }
    room[b] -= tokens;
    total += time1_[j];
  }
  return scaled(total, rank, 1);
}

void Search::improve(Layout* out) const {
  const i64 goal = out->mean + out->mean / 2000;
  int budget = int(q_.samples.size() + size_t(q_.ranks)) / 4 + 64;
  std::vector<std::vector<int>> singles(q_.ranks);
  for (int j : order_)
    if (out->rank_of[j] >= 0) singles[out->rank_of[j]].push_back(j);
  std::vector<i64> base(q_.ranks);
  std::set<std::pair<i64, int>> loads;
  for (int r = 0; r < q_.ranks; ++r) {
    base[r] = out->load[r];
    if (!singles[r].empty()) base[r] = out->base[r];
    out->load[r] = base[r] + singles_us(singles[r], r);
    if (!singles[r].empty()) loads.insert({out->load[r], r});
  }
  const auto replaced = [&](const std::vector<int>& list, int drop, int add) {
    std::vector<int> next;
    bool added = add < 0;
    for (int j : list) {
      if (!added && (time1_[add] > time1_[j] || (time1_[add] == time1_[j] && add < j))) {
        next.push_back(add);
        added = true;
      }
      if (j != drop) next.push_back(j);
    }
    if (!added) next.push_back(add);
    return next;
  };
  while (budget-- > 0 && !loads.empty()) {
    const auto [slow, c] = *loads.rbegin();
    if (slow <= goal) break;
    bool moved = false;
    auto it = loads.begin();
    for (int k = 0; k < kPartners && it != loads.end(); ++k, ++it) {
      const auto [fast, q] = *it;
      if (q == c) break;
      // The exchange whose difference is nearest to half the distance.
      const i64 half = (slow - fast) / 2;
      i64 best = slow - fast;
      int give = -1, take = -1;
      for (int i : singles[c]) {
        const i64 off = std::abs(time1_[i] - half);
        if (off < best && off < half && singles[c].size() > 1) best = off, give = i, take = -1;
        for (int j : singles[q]) {
          if (time1_[j] >= time1_[i]) continue;
          const i64 miss = std::abs(time1_[i] - time1_[j] - half);
          if (miss < best && miss < half) best = miss, give = i, take = j;
        }
      }
      if (give < 0) continue;
      const std::vector<int> mine = replaced(singles[c], give, take);
      const std::vector<int> theirs = replaced(singles[q], take, give);
      const i64 a = base[c] + singles_us(mine, c), b = base[q] + singles_us(theirs, q);
      if (std::max(a, b) >= slow) continue;
      loads.erase({slow, c});
      loads.erase({fast, q});
      singles[c] = mine;
      singles[q] = theirs;
      out->rank_of[give] = q;
      if (take >= 0) out->rank_of[take] = c;
      out->load[c] = a;
      out->load[q] = b;
      loads.insert({a, c});
      loads.insert({b, q});
      moved = true;
      break;
    }
    if (!moved) break;
  }
  out->end = *std::max_element(out->load.begin(), out->load.end());
}

}  // namespace mdcp
