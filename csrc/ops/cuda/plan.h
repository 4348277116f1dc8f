// The plan blob: what plan.cc writes on the host and plan.cuh reads in kernels.
//
// A tile is a run of rows of the tiled axis (queries; keys for dk and dv) that share one list of
// segments. In the blob a segment is already seen from the tiled axis, so that one walk serves
// both: row t of the tile meets row c of a step when low <= c - t <= high.
#pragma once

#include <cstdint>

namespace mdcp::cuda {

struct PlanSegment {
  int32_t start;        // first row along the tiled axis
  int32_t other_start;  // first row along the other axis
  int32_t other_len;
  int32_t low, high;  // bounds of (other index - tiled index)
};

struct PlanTile {
  int32_t row, rows;
  int32_t first_ref, last_ref;
};

// Rows are at most 2^29 and band bounds (make_segments keeps them within the rows) within 2^30, so
// that their sums fit an int32.
constexpr int64_t kMaxRows = int64_t(1) << 29;
constexpr int64_t kMaxBand = int64_t(1) << 30;

struct PlanView {
  const PlanSegment* segments;
  const int32_t* refs;
  const PlanTile* tiles;
  int32_t* counter;
  int32_t tile_count;
};

}  // namespace mdcp::cuda
