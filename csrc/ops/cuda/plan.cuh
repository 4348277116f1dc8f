// The walk of a tile over the rows that it meets, and the hand-out of tiles to blocks.
#pragma once

#include "plan.h"
#include "simt.cuh"

namespace mdcp::cuda {

// One block of rows of the other axis: [row, row + count), seen by query head `head`.
// count 0: there is no more.
struct Step {
  int row, count, low, high, head;
  // Does every one of the first `rows` rows of the tile see all of `block` rows?
  MDCP_DEVICE bool is_full(int rows, int block) const {
    return count == block && high >= block - 1 && low <= 1 - rows;
  }
  MDCP_DEVICE bool sees(int t, int c) const { return c < count && c - t <= high && c - t >= low; }
};

// Steps of at most `block` rows through the segments of a tile, once for each head in
// [head, last_head).
struct Walk {
  int ref, at, end, low, high, base, head, last_head;

  MDCP_DEVICE void start(const PlanTile& tile, int first_head, int heads) {
    ref = tile.first_ref;
    at = end = 0;
    head = first_head;
    last_head = first_head + heads;
  }

  MDCP_DEVICE Step next(const PlanView& plan, const PlanTile& tile, int block) {
    while (at >= end) {
      if (ref == tile.last_ref) {
        if (tile.first_ref == tile.last_ref || ++head >= last_head) return {0, 0, 0, 0, 0};
        ref = tile.first_ref;
      }
      const PlanSegment segment = plan.segments[plan.refs[ref++]];
      const int shift = tile.row - segment.start;
      low = segment.low + shift;
      high = segment.high + shift;
      base = segment.other_start;
      at = low > 0 ? low : 0;
      end = segment.other_len < tile.rows + high ? segment.other_len : tile.rows + high;
    }
    const int count = block < end - at ? block : end - at;
    const Step step{base + at, count, low - at, high - at, head};
    at += block;
    return step;
  }
};

// What a block of a tensor-core kernel works on, in shared memory: as uniform values they would
// cost every thread a register each. Thread 0 writes, one step ahead of the others.
//
// Step i is read between the barrier that follows its writing and the end of iteration i; step
// i + 1 is written during iteration i, so a ring of four is never overtaken.
struct Work {
  PlanTile tile;
  int head;   // the first of its query heads
  Walk walk;  // thread 0 alone
  Step steps[4];

  MDCP_DEVICE const Step& step(int index) const { return steps[index & 3]; }
};

// Takes the next work item: a tile (in plan order) and `group` heads of `heads` (innermost), and
// its step 0. Every thread gets the same answer; false when there is no more.
MDCP_DEVICE bool take_work(const PlanView& plan, int heads, int group, int block, Work& work) {
  block_sync();  // nobody still reads `work`, or shared memory of the tile before
  if (thread_index() == 0) {
    const int item = atomic_add(plan.counter, 1);
    work.tile.rows = 0;
    if (item < plan.tile_count * heads) {
      work.tile = plan.tiles[item / heads];
      work.head = item % heads * group;
      work.walk.start(work.tile, work.head, group);
      work.steps[0] = work.walk.next(plan, work.tile, block);
    }
  }
  block_sync();
  return work.tile.rows > 0;
}

MDCP_DEVICE void prepare_step(const PlanView& plan, int block, int index, Work& work) {
  if (thread_index() == 0) work.steps[index & 3] = work.walk.next(plan, work.tile, block);
}

}  // namespace mdcp::cuda
