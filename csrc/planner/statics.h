// The static plan (one degree for the whole batch), as megatron_dcp/planner/baselines/static.py
// makes it: the fallback that `dcp` must never be slower than.
#pragma once

#include "planner/finish.h"

namespace mdcp {

// Replaces *best by the best static plan when that is faster (or when *best is empty).
void static_fallback(const Table& table, Plan* best);

}  // namespace mdcp
