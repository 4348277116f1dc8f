#include <algorithm>

#include "paths.h"

#ifdef MDCP_HAS_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace mdcp {
namespace {

enum Level { kScalar, kLevelAvx2, kLevelAvx512, kLevelBf16, kLevelAmx };

// Whether the processor has the tiles and the kernel lets this process use them: it must be asked
// once (Linux 5.16), and refuses where a thread's signal stack is too small for their state.
bool allows_amx() {
#ifdef MDCP_HAS_AMX
  constexpr unsigned kAmxTile = 1u << 24, kAmxBf16Products = 1u << 22;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & kAmxTile) || !(d & kAmxBf16Products)) {
    return false;
  }
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

Level find_level() {
#if defined(__x86_64__) && defined(__GNUC__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (avx512 && kAvx512Bf16 && __builtin_cpu_supports("avx512bf16")) {
    return kAmxBf16 && allows_amx() ? kLevelAmx : kLevelBf16;
  }
  if (avx512 && kAvx512) return kLevelAvx512;
  if (avx2 && kAvx2) return kLevelAvx2;
#endif
  return kScalar;
}

Level machine_level() {
  static const Level level = find_level();
  return level;
}

// Intel's cores take vdpbf16ps at a quarter of the rate of a fused multiply-add: without AMX they
// are faster on bfloat16 that is widened to float32.
Level best_level() {
  const Level level = machine_level();
#if defined(__x86_64__) && defined(__GNUC__)
  if (level == kLevelBf16 && __builtin_cpu_is("intel")) return kLevelAvx512;
#endif
  return level;
}

std::atomic<int>& allowed() {
  static std::atomic<int> level{best_level()};
  return level;
}

const Path* choose(DType dtype) {
  const int level = allowed().load(std::memory_order_relaxed);
  if (dtype == DType::kFloat64 || level == kScalar) return nullptr;
  if (level == kLevelAvx2) return kAvx2;
  if (dtype != DType::kBFloat16 || level == kLevelAvx512) return kAvx512;
  return level == kLevelAmx ? kAmxBf16 : kAvx512Bf16;
}

}  // namespace

const char* path_name(DType dtype) {
  const Path* path = choose(dtype);
  return path ? path->name : "scalar";
}

bool limit_path(const std::string& name) {
  const char* const names[] = {"scalar", "avx2", "avx512", "avx512_bf16", "amx_bf16"};
  int level = best_level();
  if (name != "best") {
    level = static_cast<int>(std::find(names, names + 5, name) - names);
    if (level > machine_level()) return false;
  }
  allowed().store(level, std::memory_order_relaxed);
  return true;
}

void attention_forward(const ForwardArgs& args, const SegmentList& list, const Parallel& parallel) {
  const Path* path = choose(args.q.dtype);
  if (!path) return scalar_forward(args, list, parallel);
  const int64_t rows = forward_rows(list, args.shape, path->least_rows(args.shape),
                                    path->most_rows(args.shape), parallel.threads);
  path->forward(args, list, parallel, forward_tasks(list, args.shape, rows));
}

void attention_backward(const BackwardArgs& args, const SegmentList& list,
                        const Parallel& parallel) {
  const Path* path = choose(args.q.dtype);
  if (!path) return scalar_backward(args, list, parallel);
  const BackwardPlan plan =
      backward_plan(list, args.shape, path->backward_rows, path->least_keys(args.shape),
                    path->most_keys(args.shape));
  std::unique_ptr<float[]> partial;
  if (args.dq.dtype != DType::kFloat32) {
    partial.reset(new float[plan.partial_rows * args.shape.heads * args.shape.dim]);
  }
  path->backward(args, list, parallel, plan, partial.get());
}

}  // namespace mdcp
