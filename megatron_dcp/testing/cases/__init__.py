"""Functions that `WorkerPool` runs on every rank: cases of the distributed tests."""
