#include "plan.h"

#include <algorithm>
#include <cstdlib>
#include <new>

namespace mdcp {
namespace {

void cut_run(std::vector<Piece>& pieces, const Run& run, int64_t rows) {
  for (int64_t r = 0; r < run.len; r += rows) {
    pieces.push_back({run.start + r, std::min(rows, run.len - r), run.first_ref, run.last_ref});
  }
}

}  // namespace

std::vector<Piece> cut_axis(const Axis& axis, int64_t rows) {
  std::vector<Piece> pieces;
  for (const Run& run : axis.runs) cut_run(pieces, run, rows);
  return pieces;
}

namespace {

// Appends the tasks of a piece that costs `pairs` visible pairs a query head.
void deal_heads(std::vector<Task>& tasks, const Piece& piece, int64_t index, int64_t pairs,
                const Shape& shape) {
  constexpr int64_t kWorthATask = 1 << 20;  // multiply-adds
  const int64_t group = shape.heads / shape.kv_heads;
  const int64_t each = std::max<int64_t>(1, 2 * pairs * group * shape.dim);
  const int64_t step = std::clamp<int64_t>(kWorthATask / each, 1, shape.kv_heads);
  for (int64_t h = 0; h < shape.kv_heads; h += step) {
    tasks.push_back({piece, index, h, std::min(h + step, shape.kv_heads)});
  }
}

// Pairs of the piece's rows and the keys that any of them sees.
int64_t forward_pairs(const SegmentList& list, const Piece& piece) {
  int64_t keys = 0;
  for (int32_t ref = piece.first_ref; ref < piece.last_ref; ++ref) {
    const Segment& g = list.segments[list.q.refs[ref]];
    const int64_t i = piece.start - g.q_start;
    keys += std::max<int64_t>(0, g.last_key(i + piece.len - 1) - g.first_key(i));
  }
  return keys * piece.len;
}

}  // namespace

int64_t forward_rows(const SegmentList& list, const Shape& shape, int64_t least, int64_t most,
                     int64_t threads) {
  constexpr int64_t kTasksPerThread = 8;
  int64_t longest = 0;
  for (const Run& run : list.q.runs) longest = std::max(longest, run.len);
  int64_t rows = least;
  while (rows < longest && 2 * rows <= most) {
    int64_t heaviest = 0, total = 0;
    for (const Piece& piece : cut_axis(list.q, 2 * rows)) {
      const int64_t pairs = forward_pairs(list, piece);
      heaviest = std::max(heaviest, pairs);
      total += pairs;
    }
    if (heaviest * kTasksPerThread * threads > total * shape.kv_heads) break;
    rows *= 2;
  }
  return rows;
}

std::vector<Task> forward_tasks(const SegmentList& list, const Shape& shape, int64_t rows) {
  const std::vector<Piece> pieces = cut_axis(list.q, rows);
  std::vector<std::pair<int64_t, int64_t>> order(pieces.size());
  for (size_t p = 0; p < pieces.size(); ++p) {
    order[p] = {-forward_pairs(list, pieces[p]), static_cast<int64_t>(p)};
  }
  std::sort(order.begin(), order.end());
  std::vector<Task> tasks;
  for (const auto& [cost, p] : order) deal_heads(tasks, pieces[p], p, -cost, shape);
  return tasks;
}

BackwardPlan backward_plan(const SegmentList& list, const Shape& shape, int64_t q_rows,
                           int64_t least_keys, int64_t most_keys) {
  constexpr int64_t kTasksPerRun = 16;
  BackwardPlan plan;
  plan.q_pieces = cut_axis(list.q, q_rows);
  for (const Run& run : list.k.runs) {
    int64_t keys = least_keys;
    while (2 * keys <= most_keys && run.len * shape.kv_heads >= 2 * keys * kTasksPerRun) keys *= 2;
    cut_run(plan.k_pieces, run, keys);
  }
  plan.visits.assign(plan.q_pieces.size(), 0);
  for (const Piece& piece : plan.k_pieces) {
    plan.first_visit.push_back(static_cast<int64_t>(plan.turns.size()));
    int64_t rows = 0;
    for (int32_t ref = piece.first_ref; ref < piece.last_ref; ++ref) {
      const Segment& g = list.segments[list.k.refs[ref]];
      const int64_t j = piece.start - g.k_start;
      for_each_visit(plan, g, j, j + piece.len, [&](int64_t p) {
        plan.turns.push_back(plan.visits[p]++);
        rows += plan.q_pieces[p].len;
      });
    }
    deal_heads(plan.tasks, piece, plan.first_visit.size() - 1, rows * piece.len, shape);
  }
  plan.partial_row.assign(plan.q_pieces.size(), -1);
  for (size_t p = 0; p < plan.q_pieces.size(); ++p) {
    if (plan.visits[p] == 0) plan.unseen.push_back(static_cast<int64_t>(p));
    if (plan.visits[p] < 2) continue;
    plan.partial_row[p] = plan.partial_rows;
    plan.partial_rows += plan.q_pieces[p].len;
  }
  const size_t counters = plan.q_pieces.size() * shape.heads;
  plan.done = std::make_unique<std::atomic<uint32_t>[]>(counters);
  for (size_t i = 0; i < counters; ++i) plan.done[i].store(0, std::memory_order_relaxed);
  return plan;
}

namespace {

struct Scratch {
  float* data = nullptr;
  int64_t size = 0;
  ~Scratch() { std::free(data); }
};

thread_local Scratch scratch;

}  // namespace

float* scratch_floats(int64_t count) {
  if (scratch.size < count) {
    std::free(scratch.data);
    const size_t bytes = (static_cast<size_t>(count) * sizeof(float) + 4095) / 4096 * 4096;
    scratch.data = static_cast<float*>(std::aligned_alloc(4096, bytes));
    scratch.size = scratch.data ? count : 0;
    if (!scratch.data) throw std::bad_alloc();
  }
  return scratch.data;
}

}  // namespace mdcp
