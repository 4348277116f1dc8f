"""Training a few steps with a RefitWatch on every rank."""

from __future__ import annotations

from typing import Any

import torch

import megatron_dcp as mdcp
from megatron_dcp.cli.train.model import loss_sum
from megatron_dcp.cost import CostProfile, Link, ModelShape, digest, load
from megatron_dcp.cost.profile import Overhead
from megatron_dcp.runtime.refit import RefitWatch
from megatron_dcp.testing.cases.attention import cached_world
from megatron_dcp.testing.models import narrow_gpt


def wrong_profile() -> CostProfile:
    """A guess for the narrow GPT that is far too slow: 1 ms per token."""
    return CostProfile(
        name="guess",
        model=ModelShape(layers=2, heads=4, kv_heads=2, head_dim=8, hidden=32, vocab=256,
                         element_bytes=4),
        linear_us_per_token=1000.0,
        attn_us_per_pair=1.0,
        overhead_us=Overhead(async_=50_000.0),
        links=(Link(max_degree=2, us_per_byte=0.01, latency_us=10.0),),
        budget_bytes=10**9,
    )  # fmt: skip


def refit_case(*, folder: str, steps: int) -> dict[str, Any]:
    """Metrics of each step, the profile in use, and the proposal written at the end."""
    rng = torch.Generator().manual_seed(0)
    data = [torch.randint(256, (4 + 7 * (i % 9),), generator=rng) for i in range(steps * 8)]
    engine = mdcp.initialize(
        narrow_gpt(), None, cost=wrong_profile(), world=cached_world(), measure=True
    )
    watch = RefitWatch(engine)
    metrics, before = [], digest(engine.profile)
    loader = engine.dataloader(
        [{"input_ids": x} for x in data], global_batch_size=8, lengths=[len(x) for x in data]
    )
    optimizer = torch.optim.SGD(engine.model.parameters(), lr=0.0)
    engine.driver.optimizer = optimizer
    for step in loader:
        for mb in step:
            mb.backward(loss_sum(engine.model(**mb.inputs), mb.labels))
        step.finish()
        metrics.append(watch.after_step(step))
        engine.take_events()
    unchanged = digest(engine.profile) == before
    proposed = digest(watch.proposal.profile) if watch.proposal else None
    path = watch.at_checkpoint(folder)
    loader.position = 0  # the same steps again, planned with the new profile
    step = next(iter(loader))
    return {
        "metrics": metrics,
        "unchanged": unchanged,
        "proposed": proposed,
        "written": digest(load(path)) if path is not None else None,
        "planned_with": step.plan.cost.digest,
        "in_checkpoint": engine.state_dict()["cost"]["digest"],
        "again": watch.at_checkpoint(folder),
    }
