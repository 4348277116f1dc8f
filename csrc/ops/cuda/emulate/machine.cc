// The SIMT machine: blocks of fibers, warps, barriers and a scheduler that may be unkind.
//
// A fiber runs until it needs another one (a warp operation, a barrier) and the scheduler then
// picks the next warp by the chosen policy. On a GPU warps may run in any order between two
// barriers, and so may the lanes of a warp between two warp operations; lockstep alone hides most
// missing barriers, so the policies let one warp lead, lag, or pick at random. Shared memory starts
// as 0xff bytes (NaN as float, bf16 and fp16; -1 as int). An asynchronous copy lands as late as its
// wait allows, or at once, or either at random; until a late one lands its target reads as 0xff.
#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "collectives.h"
#include "fiber.h"
#include "simt.h"

namespace mdcp::cuda::emulate {
namespace {

enum class Schedule { lockstep, ascending, descending, random, leader, laggard };
enum class Copies { late, early, random };

struct Settings {
  Schedule schedule = Schedule::lockstep;
  Copies copies = Copies::late;
  uint32_t seed = 0;
  int resident = 2;  // blocks in flight together
  std::string skip;  // "file.cuh:12": a synchronisation to leave out
} settings;

std::string last_error;
std::set<std::string> sites_seen;

enum class State { ready, in_warp_operation, in_barrier, done };

struct Copy {
  unsigned char* shared;
  const void* global;
  bool valid;
};

struct Warp;
struct Block;

struct Lane {
  Fiber fiber;
  Block* block = nullptr;
  Warp* warp = nullptr;
  int thread = 0;
  State state = State::ready;
  Operation operation = Operation::sync;
  Operand* operand = nullptr;
  const char* file = "";
  int line = 0;
  std::vector<Copy> open;                 // issued, not committed
  std::vector<std::vector<Copy>> groups;  // committed, oldest first
};

struct Warp {
  int arrived = 0;
  int generation = 0;
  char tokens[2] = {};  // happens-before, by parity of the generation
};

struct Block {
  std::vector<Lane> lanes;
  std::vector<Warp> warps;
  std::unique_ptr<unsigned char[]> shared;
  std::map<std::pair<const void*, int>, std::unique_ptr<unsigned char[]>> statics;
  int index = 0, arrived = 0, finished = 0, generation = 0;
  char tokens[2] = {};
};

Lane* current = nullptr;
const std::function<void()>* current_kernel = nullptr;
int64_t grid_blocks = 0;
int grid_threads = 0;
bool failed = false;
std::mt19937 generator;

void fail(const std::string& reason) {
  if (!failed) last_error = reason;
  failed = true;
}

std::string site_name(const char* file, int line) {
  std::string name(file);
  const size_t slash = name.rfind('/');
  if (slash != std::string::npos) name.erase(0, slash + 1);
  return name + ":" + std::to_string(line);
}

// Notes the site and says whether the test asked to leave it out.
bool skipped(const char* kind, const char* file, int line) {
  const RaceQuiet quiet;
  static std::map<std::pair<const void*, int>, std::string> names;
  std::string& name = names[{file, line}];
  if (name.empty()) {
    name = site_name(file, line);
    sites_seen.insert(std::string(kind) + " " + name);
  }
  return !settings.skip.empty() && name == settings.skip;
}

// Data of the copy: what it reads and writes counts as this thread's accesses.
void land(const Copy& copy) {
  race_write(copy.shared, 16);
  if (copy.valid) race_read(copy.global, 16);
  const RaceQuiet quiet;
  if (copy.valid) {
    std::memcpy(copy.shared, copy.global, 16);
  } else {
    std::memset(copy.shared, 0, 16);
  }
}

void fiber_main() {
  fiber_started();
  (*current_kernel)();
  Lane* lane = current;
  race_release(lane->block);
  lane->state = State::done;
  ++lane->block->finished;
  for (;;) fiber_yield(lane->fiber, true);
}

void wait_here(State state) {
  Lane* lane = current;
  lane->state = state;
  fiber_yield(lane->fiber, false);
}

void start_block(Block& block, int index, int threads, int64_t shared_bytes) {
  block.index = index;
  block.arrived = block.finished = block.generation = 0;
  block.statics.clear();
  // Allocated for each block, so that AddressSanitizer guards both ends.
  block.shared.reset(new unsigned char[size_t(shared_bytes)]);
  std::memset(block.shared.get(), 0xff, size_t(shared_bytes));
  block.lanes.resize(size_t(threads));
  block.warps.assign(size_t((threads + kWarp - 1) / kWarp), Warp{});
  for (int i = 0; i < threads; ++i) {
    Lane& lane = block.lanes[size_t(i)];
    lane.block = &block;
    lane.warp = &block.warps[size_t(i / kWarp)];
    lane.thread = i;
    lane.state = State::ready;
    lane.open.clear();
    lane.groups.clear();
    fiber_prepare(lane.fiber, fiber_main);
  }
}

// Runs each ready lane of a warp until it waits.
void run_warp(Block& block, int warp) {
  const int lanes = std::min<int>(kWarp, int(block.lanes.size()) - warp * kWarp);
  const bool backwards = settings.schedule == Schedule::descending ||
                         (settings.schedule == Schedule::random && (generator() & 1u));
  const int first = settings.schedule == Schedule::random ? int(generator() % uint32_t(lanes)) : 0;
  for (int i = 0; i < lanes && !failed; ++i) {
    const int at = (first + i) % lanes;
    Lane& lane = block.lanes[size_t(warp * kWarp + (backwards ? lanes - 1 - at : at))];
    if (lane.state != State::ready) continue;
    current = &lane;
    fiber_resume(lane.fiber);
  }
}

bool warp_ready(const Block& block, int warp) {
  const size_t end = std::min(block.lanes.size(), size_t(warp + 1) * kWarp);
  for (size_t i = size_t(warp) * kWarp; i < end; ++i)
    if (block.lanes[i].state == State::ready) return true;
  return false;
}

void explain_deadlock(const std::vector<Block*>& resident) {
  std::set<std::string> waits;
  for (const Block* block : resident) {
    for (const Lane& lane : block->lanes) {
      if (lane.state == State::done) continue;
      const char* what = lane.state == State::in_barrier ? "block_sync" : "a warp operation";
      waits.insert(std::string(what) + " at " + site_name(lane.file, lane.line));
    }
    if (block->finished > 0) waits.insert("(some threads have returned)");
  }
  std::string text = "threads wait for each other for ever:";
  for (const std::string& wait : waits) text += " " + wait + ";";
  fail(text);
}

using Choice = std::pair<Block*, int>;

// The ready warp after the one that ran last, in order of block and warp.
Choice next_in_turn(const std::vector<Choice>& ready, std::pair<int, int>& last) {
  Choice choice = ready.front();
  for (const Choice& candidate : ready) {
    if (std::pair(candidate.first->index, candidate.second) > last) {
      choice = candidate;
      break;
    }
  }
  last = {choice.first->index, choice.second};
  return choice;
}

Choice choose(const std::vector<Choice>& ready, std::pair<int, int>& last) {
  const uint32_t count = uint32_t(ready.size());
  const auto is_chosen = [](const Choice& choice) {
    return choice.second == int(settings.seed % choice.first->warps.size());
  };
  switch (settings.schedule) {
    case Schedule::lockstep:
      return next_in_turn(ready, last);
    case Schedule::ascending:
      return ready.front();
    case Schedule::descending:
      return ready.back();
    case Schedule::random:
      return ready[generator() % count];
    case Schedule::leader:
      for (const Choice& choice : ready)
        if (is_chosen(choice)) return choice;
      return next_in_turn(ready, last);
    case Schedule::laggard:
      for (const Choice& choice : ready)
        if (!is_chosen(choice)) return choice;
      return ready.front();
  }
  return ready.front();
}

}  // namespace

int thread_index() { return current->thread; }
int block_size() { return grid_threads; }
int block_index() { return current->block->index; }
int block_count() { return int(grid_blocks); }
unsigned char* dynamic_shared() { return current->block->shared.get(); }

void* static_shared(const char* file, int line, size_t bytes) {
  const RaceQuiet quiet;
  auto& memory = current->block->statics[{file, line}];
  if (memory == nullptr) {
    memory.reset(new unsigned char[bytes]);
    std::memset(memory.get(), 0xff, bytes);
  }
  return memory.get();
}

void block_barrier(const char* file, int line) {
  if (skipped("block_sync", file, line)) return;
  Lane* lane = current;
  Block* block = lane->block;
  lane->file = file;
  lane->line = line;
  char* token = &block->tokens[block->generation & 1];
  race_release(token);
  if (++block->arrived < grid_threads) {
    wait_here(State::in_barrier);
    race_acquire(token);
    return;
  }
  block->arrived = 0;
  ++block->generation;
  for (Lane& other : block->lanes) {
    if (other.state != State::in_barrier) continue;
    if (other.line != line || std::strcmp(other.file, file) != 0)
      fail("threads of one block meet at different barriers: " + site_name(other.file, other.line) +
           " and " + site_name(file, line));
    other.state = State::ready;
  }
  race_acquire(token);
}

void warp_operation(Operation operation, Operand* operand, const char* file, int line) {
  if (operation == Operation::sync && skipped("warp_sync", file, line)) return;
  Lane* lane = current;
  Warp* warp = lane->warp;
  lane->operation = operation;
  lane->operand = operand;
  lane->file = file;
  lane->line = line;
  if (operand->address != nullptr) race_read(operand->address, 16);
  // Shuffles, ldmatrix and mma exchange registers; only __syncwarp orders memory.
  const bool orders = operation == Operation::sync;
  char* token = &warp->tokens[warp->generation & 1];
  if (orders) race_release(token);
  if (++warp->arrived < kWarp) {
    wait_here(State::in_warp_operation);
    if (orders) race_acquire(token);
    return;
  }
  warp->arrived = 0;
  ++warp->generation;
  Operand* operands[kWarp];
  Lane* lanes = &lane->block->lanes[size_t(lane->thread / kWarp * kWarp)];
  for (int i = 0; i < kWarp; ++i) {
    operands[i] = lanes[i].operand;
    if (lanes[i].operation != operation || lanes[i].line != line)
      fail("lanes of one warp meet at different operations: " +
           site_name(lanes[i].file, lanes[i].line) + " and " + site_name(file, line));
    lanes[i].state = State::ready;
  }
  const RaceQuiet quiet;  // the reads were counted when each lane arrived
  if (!failed) execute(operation, operands);
  if (orders) race_acquire(token);
}

int atomic_add(int* address, int value) {
  race_acquire(address);
  const int old = *address;
  *address = old + value;
  race_release(address);
  return old;
}

int atomic_max(int* address, int value) {
  race_acquire(address);
  const int old = *address;
  *address = std::max(old, value);
  race_release(address);
  return old;
}

void trap(const char* file, int line) {
  fail("a kernel trapped at " + site_name(file, line));
  for (;;) fiber_yield(current->fiber, true);
}

void copy_async(void* shared, const void* global, bool valid) {
  const Copy copy{static_cast<unsigned char*>(shared), global, valid};
  if ((reinterpret_cast<uintptr_t>(shared) | reinterpret_cast<uintptr_t>(global)) % 16 != 0)
    fail("cp.async of 16 bytes at an address that is not a multiple of 16");
  const bool now =
      settings.copies == Copies::early || (settings.copies == Copies::random && (generator() & 1u));
  if (now) {
    land(copy);
    return;
  }
  race_write(copy.shared, 16);
  const RaceQuiet quiet;
  std::memset(copy.shared, 0xff, 16);
  current->open.push_back(copy);
}

void copy_commit() {
  const RaceQuiet quiet;
  current->groups.push_back(std::move(current->open));
  current->open.clear();
}

void copy_wait(int groups, const char* file, int line) {
  if (skipped("copy_async_wait", file, line)) return;
  auto& pending = current->groups;
  while (int(pending.size()) > groups) {
    for (const Copy& copy : pending.front()) land(copy);
    const RaceQuiet quiet;
    pending.erase(pending.begin());
  }
}

int run_grid(const std::function<void()>& kernel, int64_t blocks, int threads,
             int64_t shared_bytes) {
  static std::vector<std::unique_ptr<Block>> pool;  // keeps the stacks
  if (blocks <= 0) return 0;
  current_kernel = &kernel;
  grid_blocks = blocks;
  grid_threads = threads;
  failed = false;
  last_error.clear();
  generator.seed(settings.seed);
  const size_t resident_limit = size_t(std::min<int64_t>(blocks, std::max(1, settings.resident)));
  while (pool.size() < resident_limit) pool.push_back(std::make_unique<Block>());

  std::vector<Block*> resident;
  int next = 0;
  std::pair<int, int> last{-1, -1};
  for (size_t i = 0; i < resident_limit; ++i) {
    if (pool[i]->lanes.size() > size_t(threads)) {
      for (size_t t = size_t(threads); t < pool[i]->lanes.size(); ++t)
        fiber_release(pool[i]->lanes[t].fiber);
    }
    start_block(*pool[i], next++, threads, shared_bytes);
    resident.push_back(pool[i].get());
  }
  std::vector<Choice> ready;
  while (!resident.empty() && !failed) {
    ready.clear();
    for (Block* block : resident)
      for (size_t warp = 0; warp < block->warps.size(); ++warp)
        if (warp_ready(*block, int(warp))) ready.emplace_back(block, int(warp));
    if (ready.empty()) {
      explain_deadlock(resident);
      break;
    }
    const Choice choice = choose(ready, last);
    run_warp(*choice.first, choice.second);
    Block* block = choice.first;
    if (block->finished < threads) continue;
    race_acquire(block);
    if (next < blocks) {
      start_block(*block, next++, threads, shared_bytes);
    } else {
      resident.erase(std::find(resident.begin(), resident.end(), block));
    }
  }
  current = nullptr;
  return failed ? 719 : 0;  // cudaErrorLaunchFailure
}

const char* last_error_text() { return last_error.c_str(); }

}  // namespace mdcp::cuda::emulate

extern "C" {

// schedule: lockstep, ascending, descending, random, leader, laggard (0-5); copies: late, early,
// random (0-2); skip: "file:line" of a synchronisation to leave out, or "".
void mdcp_emulate_configure(int schedule, int copies, uint32_t seed, int resident,
                            const char* skip) {
  using namespace mdcp::cuda::emulate;
  settings.schedule = static_cast<Schedule>(schedule);
  settings.copies = static_cast<Copies>(copies);
  settings.seed = seed;
  settings.resident = resident;
  settings.skip = skip;
}

const char* mdcp_emulate_last_error() { return mdcp::cuda::emulate::last_error.c_str(); }

// Every synchronisation that kernels of this process have reached, one "kind file:line" a line.
const char* mdcp_emulate_sites() {
  static std::string text;
  text.clear();
  for (const std::string& site : mdcp::cuda::emulate::sites_seen) text += site + "\n";
  return text.c_str();
}
}
