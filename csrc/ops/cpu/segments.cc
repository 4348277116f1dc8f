// Cuts the rows of each axis into runs that share one list of segments.
#include <algorithm>
#include <limits>

#include "attention.h"

namespace mdcp {
namespace {

// One sweep over the segment starts and ends; `begin` and `length` select the axis.
Axis make_axis(const std::vector<Segment>& segments, int64_t total, int64_t Segment::* begin,
               int64_t Segment::* length) {
  struct Event {
    int64_t position;
    int32_t segment;
    bool opens;
  };
  std::vector<Event> events;
  for (size_t s = 0; s < segments.size(); ++s) {
    const Segment& g = segments[s];
    if (g.q_len == 0 || g.k_len == 0) continue;
    events.push_back({g.*begin, static_cast<int32_t>(s), true});
    events.push_back({g.*begin + g.*length, static_cast<int32_t>(s), false});
  }
  std::sort(events.begin(), events.end(), [](const Event& a, const Event& b) {
    return a.position != b.position ? a.position < b.position : a.segment < b.segment;
  });

  Axis axis;
  std::vector<int32_t> active;  // ascending, so that refs keep the order of the list
  int64_t at = 0;
  size_t e = 0;
  while (at < total) {
    for (; e < events.size() && events[e].position == at; ++e) {
      auto slot = std::lower_bound(active.begin(), active.end(), events[e].segment);
      if (events[e].opens) {
        active.insert(slot, events[e].segment);
      } else {
        active.erase(slot);
      }
    }
    const int64_t next = e < events.size() ? events[e].position : total;
    Run run{at, next - at, static_cast<int32_t>(axis.refs.size()), 0};
    axis.refs.insert(axis.refs.end(), active.begin(), active.end());
    run.last_ref = static_cast<int32_t>(axis.refs.size());
    axis.runs.push_back(run);
    at = next;
  }
  return axis;
}

// The same pairs with bounds near the rectangle: callers may write INT64_MAX for "all keys", and
// kernels add rows to the bounds.
Segment bounded(const int64_t* r) {
  const int64_t q_len = r[1], k_len = r[3], diagonal = r[4], window = r[5];
  const int64_t high = std::clamp(diagonal, -q_len, k_len);
  if (window < 0) return {r[0], q_len, r[2], k_len, high, window};
  constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();
  const int64_t left = diagonal < kLeast + window ? kLeast : diagonal - window;
  return {r[0], q_len, r[2], k_len, high, high - std::clamp(left, -q_len, k_len)};
}

}  // namespace

SegmentList make_segments(const int64_t* rows, int64_t count, int64_t total_q, int64_t total_k) {
  SegmentList list;
  list.segments.reserve(count);
  for (int64_t s = 0; s < count; ++s) list.segments.push_back(bounded(rows + 6 * s));
  list.q = make_axis(list.segments, total_q, &Segment::q_start, &Segment::q_len);
  list.k = make_axis(list.segments, total_k, &Segment::k_start, &Segment::k_len);
  return list;
}

}  // namespace mdcp
