// Drives the planner without Python: one file of lengths, or many for gaps and times.
//
//   planner_driver plan FILE SAMPLES RANKS PER_NODE LOCKSTEP REPEATS
//
// Prints one line per file: samples/ranks, makespan, bound, gap, median CPU us, algorithm. Compiles
// alone with g++ against csrc/planner; used by the sanitizer and callgrind tests.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <string>
#include <vector>

#include "planner/search.h"

namespace {

// The preset a100-gpt7b, as docs/planner.md gives it.
mdcp::Profile a100_gpt7b() {
  mdcp::Profile p;
  p.layers = p.heads = p.kv_heads = 32;
  p.head_dim = 128;
  p.pairs = mdcp::Pairs::full;
  p.linear_us = 0.1839576 * 1000.0;
  p.attn_us = 5.128e-6 * 1000.0;
  p.again_linear = p.again_attention = 1.0 / 3;
  p.overhead_async = 20000.0;
  p.overhead_lockstep = 629000.0;
  const double bandwidth[][2] = {{2, 119.5},  {4, 104.0}, {8, 96.5},
                                 {16, 10.33}, {32, 5.94}, {64, 4.87}};
  for (const auto& row : bandwidth) p.links.push_back({int(row[0]), 1.0 / (row[1] * 1000.0), 0.0});
  p.own_comm = true;
  p.comm_bytes = 16 * 4096;
  p.kept = 4480000.0 / 32;
  p.checkpoint = p.kept / 8;
  return p;
}

double cpu_us() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

int plan_file(char** args) {
  mdcp::Request q;
  q.profile = a100_gpt7b();
  q.budget = 28672000000;
  q.ranks = std::atoi(args[2]);
  q.per_node = std::atoi(args[3]);
  q.lockstep = std::atoi(args[4]);
  const size_t samples = size_t(std::atoi(args[1]));
  std::ifstream file(args[0]);
  for (mdcp::i64 n; q.samples.size() < samples && file >> n;)
    q.samples.push_back(mdcp::sample_pack(q.profile.pairs, n, 0, 0));
  if (q.samples.size() < samples) {
    std::fprintf(stderr, "%s holds %zu lengths, %zu asked\n", args[0], q.samples.size(), samples);
    return 2;
  }
  std::vector<double> times;
  mdcp::Plan plan;
  for (int i = 0; i < std::max(1, std::atoi(args[5])); ++i) {
    const double begin = cpu_us();
    plan = mdcp::make_plan(q);
    times.push_back(cpu_us() - begin);
  }
  std::sort(times.begin(), times.end());
  std::printf("%zu/%d makespan_us %lld bound_us %lld gap %.5f cpu_us %.0f %s\n", samples, q.ranks,
              static_cast<long long>(plan.makespan_us), static_cast<long long>(plan.lower_bound_us),
              double(plan.makespan_us) / double(plan.lower_bound_us) - 1.0, times[times.size() / 2],
              plan.algorithm.c_str());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 8 && std::string(argv[1]) == "plan") return plan_file(argv + 2);
  std::fprintf(stderr, "usage: planner_driver plan FILE SAMPLES RANKS PER_NODE LOCKSTEP REPEATS\n");
  return 2;
}
