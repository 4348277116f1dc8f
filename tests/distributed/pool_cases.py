"""What the workers do in test_pool.py."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
import torch.distributed as dist

PRELOADED: list[int] = []
RUNS: list[int] = []


def preload() -> None:
    PRELOADED.append(os.getpid())


def meet() -> dict[str, Any]:
    """A sum over the world; who ran it, after what, and in how many threads."""
    RUNS.append(os.getpid())
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return {
        "sum": total.item(),
        "process": os.getpid(),
        "runs": len(RUNS),
        "preloaded": list(PRELOADED),
        "threads": len(os.listdir("/proc/self/task")),
    }


def leave_groups_behind() -> None:
    """Groups that something outside keeps alive, as a trainer's autograd hooks do."""
    import builtins

    builtins.kept_by_pool_cases = [dist.new_group() for _ in range(4)]  # type: ignore[attr-defined]


def die(*, rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()
