#include "planner/table.h"

#include <algorithm>

namespace mdcp {

namespace {

constexpr double kMostPairs = 2e18;  // of a batch, to stay inside 64 bits

bool is_power(int x) { return x > 0 && (x & (x - 1)) == 0; }

// Guards prunes against the last bit of a product taken in another order.
constexpr double kSlack = 1.0 - 1e-9;
constexpr i64 kUnset = -2;

}  // namespace

Table::Table(const Request& request) : request_(request), cost_(request) {
  const int n = request.ranks, m = request.per_node;
  for (int d = 1; d <= m; ++d) degrees_.push_back(d);
  for (int d = 2 * m; d <= n; d += m) degrees_.push_back(d);
  for (int d : degrees_) {
    power_.push_back(d <= m ? is_power(d) || d == m : is_power(d / m) || d == n);
    modes_.push_back(cost_.modes(d));
    caps_.emplace_back();
  }
  const i64 probe = i64(1) << 20;
  suffix_.assign(degrees_.size(), 0.0);
  double least = std::numeric_limits<double>::infinity();
  wire_.assign(degrees_.size(), 0.0);
  wires_.resize(degrees_.size());
  for (int i = int(degrees_.size()) - 1; i >= 0; --i) {
    for (Mode mode : modes_[i])
      wires_[i].push_back(degrees_[i] * cost_.unhidden_us(probe, degrees_[i], mode) / probe);
    wire_[i] = *std::min_element(wires_[i].begin(), wires_[i].end());
    least = std::min(least, wire_[i]);
    suffix_[i] = least * kSlack;
  }
  const Profile& p = cost_.profile();
  net_ = double(request.budget) - p.static_bytes;
  bound_overhead_ = cost_.overhead() >= 0.5 ? cost_.overhead() - 0.5 : 0.0;
  const int layers = cost_.layers();
  for (int r = 0; r <= layers; ++r) {
    const double share = net_ > 0.0 ? cost_.bytes_per_token(r) / net_ : 0.0;
    double linear = p.linear_us * (1.0 + p.linear_half * share) / cost_.stages();
    linear = linear * (1.0 + p.again_linear * (double(r) / layers));
    memory_share_.push_back(share);
    per_token_.push_back(linear + bound_overhead_ * share);
    if (r > 0 && per_token_[r] < per_token_[r - 1]) monotone_ = false;
  }
  for (const Pack& s : request.samples) {
    single_.push_back(cost_.parts(s, 1, {Scheme::local, 1}, 0));
    const double attention = single_.back().attention;
    area_.push_back(attention + p.linear_us * double(s.tokens) / cost_.stages());
    // Over every recompute; without one where more never amortises better.
    double floor = double(s.tokens) * per_token_[0] + attention;
    for (int r = 1; r <= layers && !monotone_; ++r) {
      const double again = 1.0 + p.again_attention * (double(r) / layers);
      floor = std::min(floor, double(s.tokens) * per_token_[r] + attention * again);
    }
    floor_.push_back(floor);
  }
}

int Table::index(int degree) const {
  const int m = request_.per_node;
  return degree <= m ? degree - 1 : m + degree / m - 2;
}

bool Table::legal(int degree) const {
  if (degree < 1 || degree > request_.ranks) return false;
  return degree <= request_.per_node || degree % request_.per_node == 0;
}

double Table::work(i64 tokens, double attention, double wire, int r) const {
  const double share = double(r) / cost_.layers();
  wire = wire * (1.0 + cost_.profile().again_comm * share);
  return double(tokens) * per_token_[r] + attention + double(tokens) * wire;
}

i64 Table::cap(int degree, int mode, int recompute) const {
  const int i = index(degree), levels = cost_.layers() + 1;
  std::vector<i64>& memo = caps_[i];
  if (memo.empty()) memo.assign(modes_[i].size() * size_t(levels), kUnset);
  i64& known = memo[size_t(mode * levels + recompute)];
  if (known != kUnset) return known;
  // Largest token count with bytes <= budget; bytes never fall as tokens grow.
  const Mode how = modes_[i][mode];
  i64 low = 0, high = i64(1) << 40;
  if (cost_.bytes(high, degree, how, recompute) <= request_.budget) low = high;
  while (high - low > 1) {
    const i64 mid = low + (high - low) / 2;
    if (cost_.bytes(mid, degree, how, recompute) <= request_.budget)
      low = mid;
    else
      high = mid;
  }
  known = low;
  return low;
}

int Table::least_recompute(i64 tokens, int degree, int mode) const {
  if (tokens <= cap(degree, mode, 0)) return 0;
  const int layers = cost_.layers();
  if (!request_.recompute || tokens > cap(degree, mode, layers)) return -1;
  const Mode how = modes(degree)[mode];
  int low = 0, high = layers;  // low does not fit, high does
  while (high - low > 1) {
    const int mid = (low + high) / 2;
    if (cost_.bytes(tokens, degree, how, mid) <= request_.budget)
      high = mid;
    else
      low = mid;
  }
  return high;
}

Option Table::cheapest(int sample, double limit, Family family, double keep) const {
  const Pack& s = request_.samples[sample];
  Option best;
  const double floor = floor_[sample] * kSlack, tokens = double(s.tokens);
  const double area = area_[sample] * kSlack;
  const int layers = cost_.layers();
  for (size_t i = 0; i < degrees_.size(); ++i) {
    const int d = degrees_[i];
    if (area > limit * d || (family == Family::powers && !power_[i])) continue;
    if (floor + tokens * suffix_[i] >= best.work * kSlack * keep) break;
    for (int m = 0; m < int(modes_[i].size()); ++m) {
      int r = least_recompute(s.tokens, d, m);
      if (r < 0) continue;
      const int last = monotone_ || !request_.recompute ? r : layers;
      for (; r <= last; ++r) {
        const Parts t = d == 1 && r == 0 ? single_[sample] : cost_.parts(s, d, modes_[i][m], r);
        if (t.sum() + cost_.overhead() > limit) break;
        const double w = keep < 1.0 ? t.sum() * d + tokens * (bound_overhead_ * memory_share_[r])
                                    : work(s.tokens, t.attention * d, wires_[i][m], r);
        if (w < best.work * keep) best = {d, m, r, t.sum(), w};
      }
    }
  }
  return best;
}

Option Table::on(int sample, int degree) const {
  const Pack& s = request_.samples[sample];
  const size_t i = size_t(index(degree));
  Option best;
  for (int m = 0; m < int(modes_[i].size()); ++m) {
    const int r = least_recompute(s.tokens, degree, m);
    if (r < 0) continue;
    const Parts t = cost_.parts(s, degree, modes_[i][m], r);
    if (best.degree == 0 || t.sum() < best.alone)
      best = {degree, m, r, t.sum(), work(s.tokens, t.attention * degree, wires_[i][m], r)};
  }
  return best;
}

Option Table::fastest(int sample) const {
  Option best;
  const double area = area_[sample] * kSlack;
  for (int d : degrees_) {
    if (best.degree && area > best.alone * d) continue;
    const Option o = on(sample, d);
    if (o.degree && (best.degree == 0 || o.alone < best.alone)) best = o;
  }
  return best;
}

i64 Table::best_mode(const Pack& pack, int degree, int exact, int* mode, int* r) const {
  i64 best = -1;
  const std::vector<Mode>& all = modes(degree);
  for (int m = 0; m < int(all.size()); ++m) {
    int need = least_recompute(pack.tokens, degree, m);
    if (need < 0 || (exact >= 0 && pack.tokens > cap(degree, m, exact))) continue;
    if (exact >= 0) need = exact;
    const i64 t = cost_.time_us(pack, degree, all[m], need, kNominalSpeed);
    if (best < 0 || t < best) {
      best = t;
      *mode = m;
      *r = need;
    }
  }
  return best;
}

// The fullest of the fewer packs recomputes at least what its share of the tokens needs.
bool Table::fewer_may_win(i64 tokens, int packs) const {
  const i64 share = (tokens + packs - 2) / (packs - 1);
  const int r = least_recompute(share, 1, 0);
  if (r < 0) return false;
  const Profile& p = cost_.profile();
  const double again = p.again_linear * (double(r) / cost_.layers());
  const double open = cost_.parts({}, 1, {Scheme::local, 1}, 0).sum() + cost_.overhead();
  return p.linear_us * double(share) / cost_.stages() * again <= open + packs + 1.0;
}

// Refuses batches whose pair counts or times would leave 64 bits.
void Table::check_size() const {
  double pairs = 0.0, us = 0.0;
  for (const Pack& s : request_.samples) pairs += double(s.pairs) + double(s.pairs2);
  const double linear = 1.0 + cost_.profile().again_linear;
  const double attention = 1.0 + cost_.profile().again_attention;
  for (const Parts& t : single_)
    us += t.linear * linear + t.attention * attention + cost_.overhead();
  if (pairs >= kMostPairs)
    throw PlanFailure("the global batch of " + std::to_string(request_.samples.size()) +
                      " samples has " + std::to_string(pairs) +
                      " attention pairs, more than a plan can count; check lengths");
  require_short(us);
}

void Table::require_short(double us) const {
  if (!request_.speed.empty()) {
    const int slowest = *std::min_element(request_.speed.begin(), request_.speed.end());
    us = std::max(us, us * kNominalSpeed / slowest);
  }
  if (us < kMostUs) return;
  throw PlanFailure("the global batch of " + std::to_string(request_.samples.size()) +
                    " samples is predicted to take " + std::to_string(us) +
                    " us one after the other, which no plan can hold; check lengths and cost "
                    "profile");
}

i64 Table::most_tokens() const {
  i64 most = 0;
  for (int r : {0, request_.recompute ? cost_.layers() : 0})
    for (int d : degrees_)
      for (int m = 0; m < int(modes(d).size()); ++m) most = std::max(most, cap(d, m, r));
  return most;
}

void Table::require_feasible() const {
  const int layers = request_.recompute ? cost_.layers() : 0;
  check_size();
  i64 longest = 0;
  for (const Pack& s : request_.samples) longest = std::max(longest, s.tokens);
  for (int m = 0; m < int(modes_.back().size()); ++m)
    if (longest <= cap(degrees_.back(), m, layers)) return;
  const i64 most = most_tokens();
  for (size_t j = 0; j < request_.samples.size(); ++j) {
    const i64 tokens = request_.samples[j].tokens;
    if (tokens <= most) continue;
    const int n = request_.ranks;
    i64 need = -1;
    for (Mode mode : modes(n)) {
      const i64 b = cost_.bytes(tokens, n, mode, layers);
      if (need < 0 || b < need) need = b;
    }
    throw PlanFailure(
        "sample " + std::to_string(j) + " of " + std::to_string(tokens) + " tokens needs " +
        std::to_string(need) + " bytes per rank on all " + std::to_string(n) + " ranks with " +
        (request_.recompute ? "every layer recomputed" : "recompute off") + ", the budget is " +
        std::to_string(request_.budget) +
        "; raise the memory budget, add ranks, or drop or truncate the sample (oversize)");
  }
}

}  // namespace mdcp
