// From "which samples run on which block" to exact placements: packing, slots, prices, replay.
#pragma once

#include "planner/table.h"

namespace mdcp {

// The samples that share one block. Blocks are listed in the order in which ranks run them.
struct Block {
  int first = 0, degree = 1;
  std::vector<int> samples;
};

int block_speed(const Request& request, int first, int degree);

// Sums over some samples.
Pack sum(const Request& request, const std::vector<int>& samples);

// One pack as a placement (slot 0), as Table::best_mode runs it; false when it does not fit.
bool price(const Table& table, int first, int degree, int exact, const std::vector<int>& samples,
           Placement* out);

// Packs of one block: first-fit decreasing under the memory cap; one pack fewer, with recompute,
// where that is faster; or (want > 0) so many as samples and memory allow. Appends placements with
// slot 0.
void pack_block(const Table& table, const Block& block, int want, std::vector<Placement>* out);

// Packs every block, gives each placement the first slot in which its ranks are free, sorts and
// replays. Pipeline stages: ranks run equally many microbatches, so packs of degree 1 are cut where
// a dummy would follow, and the blocks of the largest placements are cut into one pack more while
// that is faster. The plan's bound and name are the caller's.
Plan finish(const Table& table, const std::vector<Block>& blocks);

// ZeRO-3: one recompute value per slot, the largest of it; then sorts by (slot, first, -degree) and
// replays.
void close_plan(const Table& table, Plan* plan);

// Microbatches of every rank with pipeline stages that use so many slots.
int microbatches(const Request& request, int slots);

// The makespan. dummy: what a rank spends in each slot without a placement; plans are compared with
// cost().dummy_us() and stated with 0.
i64 replay(const Request& request, const std::vector<Placement>& placements, i64 dummy);

}  // namespace mdcp
