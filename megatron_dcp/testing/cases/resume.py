"""Train, checkpoint, load and train on: cases of the resume tests, run on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import megatron_dcp as mdcp
from megatron_dcp.plan import digest
from megatron_dcp.runtime.checkpoint import load_checkpoint, save_checkpoint
from megatron_dcp.testing.cases.attention import cached_world
from megatron_dcp.testing.cases.gradients import Samples, random_lengths, run_step, wrap
from megatron_dcp.testing.models import TinyModel
from megatron_dcp.testing.plans import tiny_profile


def _parts(
    seed: int, wrapper: str, strategy: str, steps: int, size: int
) -> tuple[Any, Any, nn.Module]:
    data = Samples(random_lengths(seed, size, 30), seed)
    model = TinyModel(seed=seed)
    wrapped = wrap(model, wrapper)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
    engine = mdcp.initialize(
        wrapped, optimizer, cost=tiny_profile(), strategy=strategy, scheduler=scheduler,
        max_grad_norm=0.5, world=cached_world(), ranks_per_node=cached_world().size,
    )  # fmt: skip
    loader = engine.dataloader(
        data, global_batch_size=6, lengths="lengths", seed=seed, steps=steps, epochs=4
    )
    return engine, loader, model


def resume_case(
    *,
    folder: str,
    load: bool,
    stop_after: int | None = None,
    seed: int = 0,
    wrapper: str = "bare",
    strategy: str = "dcp",
    steps: int = 8,
    size: int = 40,
    allow_previous: bool = False,
) -> dict[str, Any]:
    """Run steps, from a checkpoint of `folder` if `load`; write one after `stop_after` steps."""
    engine, loader, _ = _parts(seed, wrapper, strategy, steps, size)
    start = load_checkpoint(engine, loader, folder, allow_previous=allow_previous) if load else 0
    losses, digests, samples = [], [], []
    for step in loader:
        losses.append(run_step(engine, step))
        digests.append(digest(step.plan))
        samples.append(step.indices)
        if stop_after == step.index + 1:
            loader.position = step.index + 1
            save_checkpoint(engine, loader, folder)
            break
    return {"start": start, "losses": losses, "digests": digests, "samples": samples}


def write_case(*, folder: str, positions: list[int], seed: int = 0, keep: int = 2) -> list[str]:
    """Write checkpoints of an untrained model at some positions; their names."""
    engine, loader, _ = _parts(seed, "bare", "dcp", 50, 40)
    names = []
    for position in positions:
        loader.position = position
        names.append(Path(save_checkpoint(engine, loader, folder, keep=keep)).name)
    return names


def load_case(*, folder: str, seed: int = 0, allow_previous: bool = False) -> dict[str, Any]:
    """Load; the step, or the error's text."""
    engine, loader, _ = _parts(seed, "bare", "dcp", 50, 40)
    try:
        return {"step": load_checkpoint(engine, loader, folder, allow_previous=allow_previous)}
    except mdcp.MdcpError as error:
        return {"error": f"{type(error).__name__}: {error}"}
