// Stackful fibers: one per emulated thread, switched by hand (ucontext where the processor is not
// x86-64), known to AddressSanitizer and ThreadSanitizer.
#pragma once

#include <cstddef>

namespace mdcp::cuda::emulate {

struct Fiber {
  void* context = nullptr;  // saved stack pointer, or ucontext_t*
  unsigned char* stack = nullptr;
  size_t stack_bytes = 0;
  void* fake_stack = nullptr;  // AddressSanitizer
  void* race_fiber = nullptr;  // ThreadSanitizer
};

// Gives `fiber` a stack (kept for reuse) and makes it start in `entry`, which must never return.
void fiber_prepare(Fiber& fiber, void (*entry)());
void fiber_release(Fiber& fiber);

// From the scheduler into `fiber`, until it calls fiber_yield.
void fiber_resume(Fiber& fiber);
// From `fiber` back to the scheduler; `last`: it will not be resumed.
void fiber_yield(Fiber& fiber, bool last);
// First thing that `entry` calls.
void fiber_started();

// Happens-before edges and accesses, for ThreadSanitizer; nothing without it.
void race_release(void* token);
void race_acquire(void* token);
void race_read(const void* address, int bytes);
void race_write(void* address, int bytes);

// While one lives, what this fiber does is the machine's own business (bookkeeping, allocation).
struct RaceQuiet {
  RaceQuiet();
  ~RaceQuiet();
};

}  // namespace mdcp::cuda::emulate
