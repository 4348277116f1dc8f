"""The processes of a run on CPUs: a thread and a core each, a gloo world, progress on stderr."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megatron_dcp.runtime.memory import keep_memory


def pin_threads() -> None:
    """One thread and one core per rank, so that a rank's compute does not depend on the others."""
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity") and "LOCAL_RANK" in os.environ:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"]) % len(cores)]})


@contextmanager
def data_ranks(device: str = "cpu") -> Iterator[None]:
    """Under a launcher with several ranks, join them: over gloo, each pinned to a core, or over
    NCCL, each on its GPU (device `cuda`)."""
    if device == "cpu":
        keep_memory()
        pin_threads()
    else:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo" if device == "cpu" else "nccl")
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


class Progress:
    """Lines on stderr from rank 0, with the seconds since the start."""

    def __init__(self) -> None:
        self.begin = time.monotonic()

    def __call__(self, text: str) -> None:
        if int(os.environ.get("RANK", "0")) == 0:
            seconds = time.monotonic() - self.begin
            print(f"[{seconds:6.1f} s] {text}", file=sys.stderr, flush=True)
