#include "fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

// The build passes these beside -fsanitize=...: the files of the machine itself are never
// instrumented, only the kernels are.
#ifdef MDCP_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef MDCP_TSAN
#include <sanitizer/tsan_interface.h>
extern "C" {
void __tsan_read_range(void* address, unsigned long size);
void __tsan_write_range(void* address, unsigned long size);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

namespace mdcp::cuda::emulate {
namespace {

#if defined(MDCP_ASAN) || defined(MDCP_TSAN)
constexpr size_t kStackBytes = 256 * 1024;
#else
constexpr size_t kStackBytes = 64 * 1024;
#endif

#if !defined(__x86_64__)
ucontext_t scheduler_ucontext;
#else
void* scheduler_context = nullptr;
#endif
#ifdef MDCP_ASAN
void* scheduler_fake_stack = nullptr;
const void* scheduler_bottom = nullptr;
size_t scheduler_bytes = 0;
#endif
#ifdef MDCP_TSAN
void* scheduler_race_fiber = nullptr;
#endif

}  // namespace

#if defined(__x86_64__)
// mdcp_fiber_switch(void** save, void* load): callee-saved registers go on the stack.
extern "C" void mdcp_fiber_switch(void** save, void* load);
asm(R"(
.text
.globl mdcp_fiber_switch
.type mdcp_fiber_switch,@function
mdcp_fiber_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size mdcp_fiber_switch,.-mdcp_fiber_switch
)");
#endif

void fiber_prepare(Fiber& fiber, void (*entry)()) {
  if (fiber.stack == nullptr) {
    const size_t page = size_t(sysconf(_SC_PAGESIZE));
    void* memory = mmap(nullptr, kStackBytes + page, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
      std::perror("mdcp emulate: no memory for a fiber's stack");
      std::abort();
    }
    mprotect(memory, page, PROT_NONE);  // an overflow faults here instead of in a neighbour
    fiber.stack = static_cast<unsigned char*>(memory) + page;
    fiber.stack_bytes = kStackBytes;
  }
#ifdef MDCP_ASAN
  __asan_unpoison_memory_region(fiber.stack, fiber.stack_bytes);  // left by an abandoned run
  fiber.fake_stack = nullptr;
#endif
#ifdef MDCP_TSAN
  if (fiber.race_fiber != nullptr) __tsan_destroy_fiber(fiber.race_fiber);
  fiber.race_fiber = __tsan_create_fiber(0);
#endif
#if defined(__x86_64__)
  auto* top = reinterpret_cast<uint64_t*>(fiber.stack + fiber.stack_bytes);
  *--top = 0;  // the entry sees a stack as after a call: 16-byte aligned plus 8
  *--top = reinterpret_cast<uint64_t>(entry);
  for (int i = 0; i < 6; ++i) *--top = 0;
  fiber.context = top;
#else
  auto* context = static_cast<ucontext_t*>(fiber.context);
  if (context == nullptr) fiber.context = context = new ucontext_t;
  getcontext(context);
  context->uc_stack.ss_sp = fiber.stack;
  context->uc_stack.ss_size = fiber.stack_bytes;
  context->uc_link = nullptr;
  makecontext(context, entry, 0);
#endif
}

void fiber_release(Fiber& fiber) {
  if (fiber.stack == nullptr) return;
  const size_t page = size_t(sysconf(_SC_PAGESIZE));
  munmap(fiber.stack - page, fiber.stack_bytes + page);
  fiber.stack = nullptr;
#ifdef MDCP_TSAN
  if (fiber.race_fiber != nullptr) __tsan_destroy_fiber(fiber.race_fiber);
  fiber.race_fiber = nullptr;
#endif
#if !defined(__x86_64__)
  delete static_cast<ucontext_t*>(fiber.context);
  fiber.context = nullptr;
#endif
}

void fiber_resume(Fiber& fiber) {
#ifdef MDCP_ASAN
  __sanitizer_start_switch_fiber(&scheduler_fake_stack, fiber.stack, fiber.stack_bytes);
#endif
#ifdef MDCP_TSAN
  scheduler_race_fiber = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(fiber.race_fiber, __tsan_switch_to_fiber_no_sync);
#endif
#if defined(__x86_64__)
  mdcp_fiber_switch(&scheduler_context, fiber.context);
#else
  swapcontext(&scheduler_ucontext, static_cast<ucontext_t*>(fiber.context));
#endif
#ifdef MDCP_ASAN
  __sanitizer_finish_switch_fiber(scheduler_fake_stack, nullptr, nullptr);
#endif
}

void fiber_yield(Fiber& fiber, bool last) {
  (void)last;
#ifdef MDCP_ASAN
  __sanitizer_start_switch_fiber(last ? nullptr : &fiber.fake_stack, scheduler_bottom,
                                 scheduler_bytes);
#endif
#ifdef MDCP_TSAN
  __tsan_switch_to_fiber(scheduler_race_fiber, __tsan_switch_to_fiber_no_sync);
#endif
#if defined(__x86_64__)
  mdcp_fiber_switch(&fiber.context, scheduler_context);
#else
  swapcontext(static_cast<ucontext_t*>(fiber.context), &scheduler_ucontext);
#endif
#ifdef MDCP_ASAN
  __sanitizer_finish_switch_fiber(fiber.fake_stack, &scheduler_bottom, &scheduler_bytes);
#endif
}

void fiber_started() {
#ifdef MDCP_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_bottom, &scheduler_bytes);
#endif
}

#ifdef MDCP_TSAN
void race_release(void* token) { __tsan_release(token); }
void race_acquire(void* token) { __tsan_acquire(token); }
void race_read(const void* address, int bytes) {
  __tsan_read_range(const_cast<void*>(address), static_cast<unsigned long>(bytes));
}
void race_write(void* address, int bytes) {
  __tsan_write_range(address, static_cast<unsigned long>(bytes));
}
RaceQuiet::RaceQuiet() {
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
}
RaceQuiet::~RaceQuiet() {
  AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
}
#else
RaceQuiet::RaceQuiet() {}
RaceQuiet::~RaceQuiet() {}
void race_release(void*) {}
void race_acquire(void*) {}
void race_read(const void*, int) {}
void race_write(void*, int) {}
#endif

}  // namespace mdcp::cuda::emulate
