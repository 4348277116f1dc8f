#include <algorithm>

#include "paths.h"

namespace mdcp {
namespace {

enum Level { kScalar, kLevelAvx2, kLevelAvx512, kLevelBf16 };

Level machine_level() {
#if defined(__x86_64__) && defined(__GNUC__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (avx512 && kAvx512Bf16 && __builtin_cpu_supports("avx512bf16")) return kLevelBf16;
  if (avx512 && kAvx512) return kLevelAvx512;
  if (avx2 && kAvx2) return kLevelAvx2;
#endif
  return kScalar;
}

std::atomic<int>& allowed() {
  static std::atomic<int> level{machine_level()};
  return level;
}

const Path* choose(DType dtype) {
  const int level = allowed().load(std::memory_order_relaxed);
  if (dtype == DType::kFloat64 || level == kScalar) return nullptr;
  if (level == kLevelAvx2) return kAvx2;
  return level == kLevelBf16 && dtype == DType::kBFloat16 ? kAvx512Bf16 : kAvx512;
}

}  // namespace

const char* path_name(DType dtype) {
  const Path* path = choose(dtype);
  return path ? path->name : "scalar";
}

bool limit_path(const std::string& name) {
  const char* const names[] = {"scalar", "avx2", "avx512", "avx512_bf16"};
  const int best = machine_level();
  int level = best;
  if (name != "best") {
    level = static_cast<int>(std::find(names, names + 4, name) - names);
    if (level > best) return false;
  }
  allowed().store(level, std::memory_order_relaxed);
  return true;
}

void attention_forward(const ForwardArgs& args, const SegmentList& list, const Parallel& parallel) {
  const Path* path = choose(args.q.dtype);
  if (!path) return scalar_forward(args, list, parallel);
  path->forward(args, list, parallel,
                forward_tasks(list, args.shape, path->forward_rows(args.shape)));
}

void attention_backward(const BackwardArgs& args, const SegmentList& list,
                        const Parallel& parallel) {
  const Path* path = choose(args.q.dtype);
  if (!path) return scalar_backward(args, list, parallel);
  const BackwardPlan plan =
      backward_plan(list, args.shape, path->backward_rows, path->backward_keys(args.shape));
  std::unique_ptr<float[]> partial;
  if (args.dq.dtype != DType::kFloat32) {
    partial.reset(new float[plan.partial_rows * args.shape.heads * args.shape.dim]);
  }
  path->backward(args, list, parallel, plan, partial.get());
}

}  // namespace mdcp
