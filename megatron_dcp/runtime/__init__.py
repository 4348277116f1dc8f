"""Engine, accumulation, recompute, loss, profiler."""
