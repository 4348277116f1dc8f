// Host and device helpers that every attention kernel needs: row pointers, the plan as kernels see
// it, the persistent launch.
#pragma once

#include "api.h"
#include "plan.h"
#include "simt.cuh"

namespace mdcp::cuda {

template <class T>
MDCP_DEVICE const T* row_pointer(const MdcpRows& rows, int64_t row, int64_t head) {
  return static_cast<const T*>(rows.data) + row * rows.row_stride + head * rows.head_stride;
}

inline PlanView view_plan(const MdcpAttentionPlan& plan, void* blob) {
  char* const base = static_cast<char*>(blob);
  return {reinterpret_cast<const PlanSegment*>(base + plan.segments),
          reinterpret_cast<const int32_t*>(base + plan.refs),
          reinterpret_cast<const PlanTile*>(base + plan.tiles),
          reinterpret_cast<int32_t*>(base + plan.counter), int32_t(plan.tile_count)};
}

// A persistent launch: as many blocks as fit the device, each taking tiles until none is left.
template <class Params>
int launch_persistent(void (*kernel)(Params), const Params& params, int heads, int threads,
                      int64_t shared_bytes, void* stream) {
  const int64_t work = int64_t(params.plan.tile_count) * heads;
  if (work == 0) return 0;
  int64_t blocks = 0;
  if (const int error = resident_blocks(kernel, threads, shared_bytes, &blocks)) return error;
  if (const int error = zero_bytes(params.plan.counter, sizeof(int32_t), stream)) return error;
  return launch(kernel, params, blocks < work ? blocks : work, threads, shared_bytes, stream);
}

}  // namespace mdcp::cuda
