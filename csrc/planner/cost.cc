#include "planner/cost.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace mdcp {

namespace {

int ceil_div(int a, int b) { return (a + b - 1) / b; }

// A double as an integer; what 64 bits cannot hold becomes the largest value, above every budget.
i64 whole(double x) { return x < 9e18 ? i64(x) : std::numeric_limits<i64>::max(); }

}  // namespace

Pack sample_pack(Pairs kind, i64 length, i64 frames, i64 area) {
  if (kind == Pairs::causal) return {length, length * (length + 1) / 2, length + 1, 0, 0};
  if (kind == Pairs::full) return {length, length * length, 2 * length, 0, 0};
  return {length, frames * area * area, 2 * area, area * frames * frames, 2 * frames};
}

const char* scheme_name(Scheme scheme) {
  switch (scheme) {
    case Scheme::local:
      return "local";
    case Scheme::ulysses:
      return "ulysses";
    case Scheme::ring:
      return "ring";
    case Scheme::allgather:
      return "allgather";
    default:
      return "hybrid";
  }
}

Cost::Cost(const Request& request)
    : p_(request.profile),
      per_node_(request.per_node),
      stages_(request.stages),
      layers_(request.profile.layers / request.stages),
      overhead_(request.lockstep == 1 ? p_.overhead_async : p_.overhead_lockstep) {
  const int p = request.stages, v = request.virtual_stages;
  in_flight_ = v == 1 ? double(p) : double(2 * (p - 1) + (v - 1) * p + 1) / v;
  if (p == 1) return;
  int speed = kNominalSpeed;
  if (!request.speed.empty()) speed = *std::min_element(request.speed.begin(), request.speed.end());
  dummy_us_ = time_us(sample_pack(p_.pairs, 1, 1, 1), 1, {Scheme::local, 1}, 0, speed);
}

const Link& Cost::link(int degree) const {
  for (const Link& row : p_.links)
    if (row.max_degree >= degree) return row;
  return p_.links.back();
}

void Cost::wire(i64 tokens, int degree, Mode mode, double* inner, double* outer) const {
  const double x = double(tokens) / degree;
  *inner = *outer = 0.0;
  if (degree == 1) return;
  if (p_.own_comm) {
    *outer = p_.comm_bytes * x;
    return;
  }
  const int e = p_.element_bytes, a = std::max(4, e), u = mode.inner;
  const int rep = std::max(1, ceil_div(u, p_.kv_heads));
  double ulysses = 0.0;
  if (u > 1) {
    const i64 row = i64(2 * p_.heads + 2 * p_.kv_heads * rep) * p_.head_dim * e;
    ulysses = double(u - 1) / u * x * double(row);
  }
  *inner = ulysses + ulysses;
  if (mode.scheme == Scheme::local || mode.scheme == Scheme::ulysses) return;
  const int d = degree / u;
  const int kv = mode.scheme == Scheme::hybrid ? ceil_div(p_.kv_heads * rep, u) : p_.kv_heads;
  const double ring = double(tokens) / d * double(i64(2) * kv * p_.head_dim);
  const double forward = (d - 1) * ring * e;
  if (mode.scheme == Scheme::allgather)
    *outer = forward + (d - 1) * ring * (e + a);
  else
    *outer = forward + ((d - 1) * e + d * a) * ring;
}

double Cost::overlap(Scheme scheme) const {
  if (scheme == Scheme::ulysses) return p_.overlap_ulysses;
  return scheme == Scheme::allgather ? p_.overlap_allgather : p_.overlap_ring;
}

double Cost::comm_us(i64 tokens, int degree, Mode mode, double share, double attention) const {
  if (degree == 1) return 0.0;
  double inner, outer;
  wire(tokens, degree, mode, &inner, &outer);
  const bool plain = mode.scheme == Scheme::local || mode.scheme == Scheme::ulysses;
  const int d = degree / mode.inner;
  const int n_inner = mode.inner > 1 ? 4 : 0;
  const int n_outer = plain ? 0 : (mode.scheme == Scheme::allgather ? 3 : 3 * d - 2);
  const Link& far = link(degree);
  const Link& near = link(mode.inner);
  double wire_us = inner * layers_ * near.us_per_byte + outer * layers_ * far.us_per_byte;
  wire_us = wire_us * (1.0 + p_.again_comm * share);
  wire_us = wire_us + (n_inner * near.latency_us + n_outer * far.latency_us) * layers_;
  const double hidden = overlap(mode.scheme) * attention;
  return wire_us > hidden ? wire_us - hidden : 0.0;
}

double Cost::unhidden_us(i64 tokens, int degree, Mode mode) const {
  if (degree == 1 || overlap(mode.scheme) > 0.0) return 0.0;
  double inner, outer;
  wire(tokens, degree, mode, &inner, &outer);
  return inner * layers_ * link(mode.inner).us_per_byte +
         outer * layers_ * link(degree).us_per_byte;
}

Parts Cost::parts(const Pack& pack, int degree, Mode mode, int recompute) const {
  const double x = double(pack.tokens) / degree;
  const double share = double(recompute) / layers_;
  double linear = p_.linear_us * (x + p_.linear_half) / stages_;
  linear = linear * (1.0 + p_.again_linear * share);
  const double h = p_.attn_half * degree;
  double attn;
  if (p_.pairs == Pairs::grid) {
    attn = p_.spatial_us * ((double(pack.pairs) + h * (double(pack.half) / 2)) / degree);
    attn = attn + p_.temporal_us * ((double(pack.pairs2) + h * (double(pack.half2) / 2)) / degree);
  } else {
    attn = p_.attn_us * ((double(pack.pairs) + h * (double(pack.half) / 2)) / degree);
  }
  attn = attn / stages_;
  attn = attn * (1.0 + p_.again_attention * share);
  return {linear, attn, comm_us(pack.tokens, degree, mode, share, attn)};
}

i64 Cost::time_us(const Pack& pack, int degree, Mode mode, int recompute, int speed) const {
  const Parts t = parts(pack, degree, mode, recompute);
  double total = t.linear + t.attention + t.comm + overhead_;
  if (speed != kNominalSpeed) total = total * kNominalSpeed / speed;
  return rounded(total);
}

double Cost::bytes_per_token(int recompute) const {
  const double kept = p_.kept * (layers_ - recompute);
  const double stored = kept + p_.checkpoint * recompute;
  const double per_token = stored * in_flight_;
  return per_token + p_.working + p_.head_bytes;
}

double Cost::gathered(i64 tokens, int degree, Mode mode) const {
  if (degree == 1 || p_.own_comm) return 0.0;
  const i64 row = i64(2) * p_.kv_heads * p_.head_dim * p_.element_bytes;
  if (mode.scheme == Scheme::allgather) return double(tokens) * double(row);
  if (mode.scheme == Scheme::ring || mode.scheme == Scheme::hybrid)
    return 2 * (double(tokens) / degree) * double(row);
  return 0.0;
}

i64 Cost::bytes(i64 tokens, int degree, Mode mode, int recompute) const {
  const double x = double(tokens) / degree;
  const double total = p_.static_bytes + x * bytes_per_token(recompute);
  return whole(std::ceil(total + gathered(tokens, degree, mode)));
}

bool Cost::ulysses_allows(int degree) const {
  if (p_.own_comm) return true;
  const int h = p_.heads, hk = p_.kv_heads;
  return h % degree == 0 && (hk % degree == 0 || degree % hk == 0);
}

std::vector<Mode> Cost::modes(int degree) const {
  if (degree == 1) return {{Scheme::local, 1}};
  if (p_.own_comm) {
    if (degree <= per_node_)
      return {p_.heads % degree == 0 ? Mode{Scheme::ulysses, degree} : Mode{Scheme::ring, 1}};
    const int inner = std::gcd(per_node_, p_.heads);
    return {inner > 1 ? Mode{Scheme::hybrid, inner} : Mode{Scheme::ring, 1}};
  }
  std::vector<Mode> out;
  if (degree <= per_node_ && ulysses_allows(degree)) out.push_back({Scheme::ulysses, degree});
  out.push_back({Scheme::ring, 1});
  out.push_back({Scheme::allgather, 1});
  const int ranks = std::min(degree, per_node_);
  for (int u = ranks; u > 1; --u)
    if (ranks % u == 0 && u < degree && ulysses_allows(u)) out.push_back({Scheme::hybrid, u});
  return out;
}

}  // namespace mdcp
