// The lower bound on the makespan (docs/planner.md): no plan of the model is faster.
#pragma once

#include "planner/table.h"

namespace mdcp {

struct Bound {
  i64 us = 0;    // the bound, with its lockstep and pipeline terms
  i64 area = 0;  // the async part alone: where the search starts
};

Bound lower_bound(const Table& table);

}  // namespace mdcp
