// Host side of the attention plan: cuts the rows of the tiled axis into runs that share one list of
// segments, the runs into tiles, and sorts the tiles by their work.
#include "plan.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "../cpu/attention.h"
#include "attention_host.h"

namespace mdcp::cuda {
namespace {

constexpr int64_t kAlign = 256;

int64_t align(int64_t offset) { return (offset + kAlign - 1) / kAlign * kAlign; }

// The segment as the tiled axis sees it: bounds of (other index - tiled index).
PlanSegment view_segment(const Segment& s, bool along_keys) {
  const int64_t high = s.diagonal, low = s.window < 0 ? -kMaxBand : s.diagonal - s.window;
  if (along_keys)
    return {int32_t(s.k_start), int32_t(s.q_start), int32_t(s.q_len), int32_t(-high),
            int32_t(-low)};
  return {int32_t(s.q_start), int32_t(s.k_start), int32_t(s.k_len), int32_t(low), int32_t(high)};
}

// Rows of the other axis that a tile walks over.
int64_t tile_work(const PlanTile& tile, const std::vector<PlanSegment>& segments,
                  const std::vector<int32_t>& refs) {
  int64_t work = 0;
  for (int32_t r = tile.first_ref; r < tile.last_ref; ++r) {
    const PlanSegment& s = segments[size_t(refs[size_t(r)])];
    const int64_t shift = int64_t(tile.row) - s.start;
    const int64_t first = std::max<int64_t>(0, s.low + shift);
    const int64_t last = std::min<int64_t>(s.other_len, shift + tile.rows + s.high);
    work += std::max<int64_t>(0, last - first);
  }
  return work;
}

std::vector<PlanTile> make_tiles(const Axis& axis, const std::vector<PlanSegment>& segments,
                                 int tile_rows) {
  std::vector<PlanTile> tiles;
  for (const Run& run : axis.runs)
    for (int64_t at = 0; at < run.len; at += tile_rows)
      tiles.push_back({int32_t(run.start + at), int32_t(std::min<int64_t>(tile_rows, run.len - at)),
                       run.first_ref, run.last_ref});
  std::vector<std::pair<int64_t, size_t>> order;  // most work first, then by row
  for (size_t i = 0; i < tiles.size(); ++i)
    order.emplace_back(-tile_work(tiles[i], segments, axis.refs), i);
  std::sort(order.begin(), order.end());
  std::vector<PlanTile> sorted;
  sorted.reserve(tiles.size());
  for (const auto& entry : order) sorted.push_back(tiles[entry.second]);
  return sorted;
}

bool inside(const int64_t* host_segments, int64_t count, int64_t total_q, int64_t total_k) {
  if (total_q < 0 || total_k < 0 || total_q > kMaxRows || total_k > kMaxRows) return false;
  for (int64_t s = 0; s < count; ++s) {
    const int64_t* r = host_segments + 6 * s;
    if (r[0] < 0 || r[1] < 0 || r[1] > total_q || r[0] > total_q - r[1] || r[2] < 0 || r[3] < 0 ||
        r[3] > total_k || r[2] > total_k - r[3])
      return false;
  }
  return true;
}

template <class T>
void write(void* blob, int64_t offset, const std::vector<T>& values) {
  if (!values.empty())
    std::memcpy(static_cast<char*>(blob) + offset, values.data(), values.size() * sizeof(T));
}

}  // namespace
}  // namespace mdcp::cuda

int mdcp_cuda_attention_plan(const int64_t* host_segments, int64_t segment_count, int64_t total_q,
                             int64_t total_k, int pass, int dtype, int head_dim, int scalar,
                             MdcpAttentionPlan* plan, void* host_blob, int64_t capacity) {
  using namespace mdcp::cuda;
  if (!inside(host_segments, segment_count, total_q, total_k)) return MDCP_CUDA_BAD_ARGUMENT;
  if (!scalar && dtype != MDCP_BF16 && dtype != MDCP_F16) return MDCP_CUDA_BAD_DTYPE;
  const int padded = padded_head_dim(head_dim);
  if (scalar ? head_dim < 1 || head_dim > 256 : padded == 0) return MDCP_CUDA_BAD_HEAD_DIM;

  const bool along_keys = pass == MDCP_BACKWARD_KV;
  const mdcp::SegmentList list =
      mdcp::make_segments(host_segments, segment_count, total_q, total_k);
  const mdcp::Axis& axis = along_keys ? list.k : list.q;
  std::vector<PlanSegment> segments;
  for (const mdcp::Segment& s : list.segments) segments.push_back(view_segment(s, along_keys));
  plan->tile_rows = scalar ? kScalarTileRows : tile_rows_of(pass, padded);
  const std::vector<PlanTile> tiles = make_tiles(axis, segments, int(plan->tile_rows));

  plan->segments = 0;
  plan->refs = align(int64_t(segments.size() * sizeof(PlanSegment)));
  plan->tiles = plan->refs + align(int64_t(axis.refs.size() * sizeof(int32_t)));
  plan->counter = plan->tiles + align(int64_t(tiles.size() * sizeof(PlanTile)));
  plan->bytes = plan->counter + kAlign;
  plan->tile_count = int64_t(tiles.size());
  if (host_blob != nullptr && capacity >= plan->bytes) {
    std::memset(host_blob, 0, size_t(plan->bytes));
    write(host_blob, plan->segments, segments);
    write(host_blob, plan->refs, axis.refs);
    write(host_blob, plan->tiles, tiles);
  }
  return 0;
}
