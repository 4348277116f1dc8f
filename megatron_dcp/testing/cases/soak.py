"""Many steps with a new random plan each: what grows?"""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import torch

import megatron_dcp as mdcp
from megatron_dcp.testing.cases.attention import cached_world
from megatron_dcp.testing.cases.gradients import Samples, plan_maker, random_lengths, run_step
from megatron_dcp.testing.models import TinyModel
from megatron_dcp.testing.plans import tiny_profile


def _resident_kib() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise OSError("/proc/self/status has no VmRSS")


def soak_case(*, steps: int, warm_up: int, seed: int = 0) -> dict[str, Any]:
    """Resident memory (KiB), file descriptors, groups and tensors after the warm-up and the end."""
    data = Samples(random_lengths(seed, 200, 60), seed)
    model = TinyModel(seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    world = cached_world()
    engine = mdcp.initialize(
        model, optimizer, cost=tiny_profile(), plan_fn=plan_maker(None, seed, False), world=world
    )
    loader = engine.dataloader(
        data, global_batch_size=8, lengths="lengths", steps=steps, epochs=steps
    )
    marks: list[dict[str, int]] = []
    losses = []
    for step in loader:
        losses.append(run_step(engine, step))
        if step.index + 1 in (warm_up, steps):
            gc.collect()
            marks.append({
                "resident_kib": _resident_kib(),
                "descriptors": len(os.listdir("/proc/self/fd")),
                "communicators": world.communicators,
                "threads": len(os.listdir("/proc/self/task")),
                "tensors": sum(isinstance(x, torch.Tensor) for x in gc.get_objects()),
            })  # fmt: skip
    return {"warm": marks[0], "end": marks[1], "losses": losses}
