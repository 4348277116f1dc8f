// How a call is cut into tasks. Where a cut could change the bits of a result it depends on the
// segment list alone, never on the number of threads, and inside a sample never on what else is
// packed.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "attention.h"

namespace mdcp {

struct Piece {
  int64_t start, len;
  int32_t first_ref, last_ref;
};

std::vector<Piece> cut_axis(const Axis& axis, int64_t rows);

// KV heads [first_head, last_head) of one piece: several where the piece alone is little work.
struct Task {
  Piece piece;
  int64_t index;  // of the piece
  int64_t first_head, last_head;
};

// The q rows of a forward task, from `least` to `most`. Each task packs the keys that it sees for
// itself, so the longer its piece the better, as long as each of `threads` still has several tasks
// no smaller than the heaviest. This alone depends on the number of threads: a row of the result
// is the same in whatever piece it lies.
int64_t forward_rows(const SegmentList& list, const Shape& shape, int64_t least, int64_t most,
                     int64_t threads);

// Tasks over pieces of at most `rows` q rows, the heaviest first.
std::vector<Task> forward_tasks(const SegmentList& list, const Shape& shape, int64_t rows);

// The backward runs one task per (piece of k, KV head). Each task reads the q rows that see its
// keys for itself, so a run is cut into pieces of up to `most_keys`, but never fewer tasks than
// kTasksPerRun for that (then pieces have `least_keys`). Several tasks add to the same piece of dq;
// they take turns in task order. Tasks are drawn in order, so a waiting task only ever waits for
// tasks that have started.
struct BackwardPlan {
  std::vector<Piece> q_pieces, k_pieces;
  std::vector<Task> tasks;           // pieces of k in order
  std::vector<int64_t> first_visit;  // per k piece, into turns
  std::vector<uint32_t> turns;       // turn of each visit (k piece, segment, q piece)
  std::vector<uint32_t> visits;      // per q piece: how many
  std::vector<int64_t> partial_row;  // per q piece with several visits: row in the partial sums
  std::vector<int64_t> unseen;       // q pieces without visits
  int64_t partial_rows = 0;
  std::unique_ptr<std::atomic<uint32_t>[]> done;  // [q pieces, heads]
};

BackwardPlan backward_plan(const SegmentList& list, const Shape& shape, int64_t q_rows,
                           int64_t least_keys, int64_t most_keys);

// Calls visit(q piece) for each q piece of `g` that sees keys [j0, j1) of it, in order.
template <class F>
void for_each_visit(const BackwardPlan& plan, const Segment& g, int64_t j0, int64_t j1,
                    const F& visit) {
  int64_t lo = g.first_row(j0), hi = g.last_row(j1 - 1);
  if (hi > g.q_len) hi = g.q_len;
  if (lo >= hi) return;
  // Binary search for the piece that holds the first row.
  int64_t a = 0, b = static_cast<int64_t>(plan.q_pieces.size());
  while (b - a > 1) {
    const int64_t mid = (a + b) / 2;
    (plan.q_pieces[mid].start <= g.q_start + lo ? a : b) = mid;
  }
  for (; a < static_cast<int64_t>(plan.q_pieces.size()) && plan.q_pieces[a].start < g.q_start + hi;
       ++a) {
    visit(a);
  }
}

// Scratch of the calling thread: 64-byte aligned, grows, kept until the thread ends.
float* scratch_floats(int64_t count);

}  // namespace mdcp
