// The vector paths of this build and which of them the running machine can use.
#pragma once

#include <string>

#include "plan.h"

namespace mdcp {

struct Path {
  const char* name;
  int64_t (*least_rows)(const Shape&);  // q rows of a forward task: at least,
  int64_t (*most_rows)(const Shape&);   // and at most
  int64_t (*least_keys)(const Shape&);  // keys of a backward task, likewise
  int64_t (*most_keys)(const Shape&);
  int64_t backward_rows;  // q rows of a backward step
  void (*forward)(const ForwardArgs&, const SegmentList&, const Parallel&,
                  const std::vector<Task>&);
  void (*backward)(const BackwardArgs&, const SegmentList&, const Parallel&, const BackwardPlan&,
                   float* partial);
};

// Compilers (with their assemblers) that know AMX.
#if defined(__linux__) && defined(__x86_64__)
#if defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11
#define MDCP_HAS_AMX
#endif
#endif

// Null where the build has no such path (another architecture or compiler).
extern const Path* const kAmxBf16;
extern const Path* const kAvx512Bf16;
extern const Path* const kAvx512;
extern const Path* const kAvx2;

// Name of the path that inputs of `dtype` take: amx_bf16, avx512_bf16, avx512, avx2 or scalar.
const char* path_name(DType dtype);

// Allows no path above `name` (or all that the machine has, for "best"). False if the name is
// unknown or the machine lacks it. For tests and `mdcp doctor`.
bool limit_path(const std::string& name);

void attention_forward(const ForwardArgs& args, const SegmentList& list, const Parallel& parallel);
void attention_backward(const BackwardArgs& args, const SegmentList& list,
                        const Parallel& parallel);

}  // namespace mdcp
