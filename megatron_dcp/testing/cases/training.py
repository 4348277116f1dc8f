"""Some optimizer steps over ranks: losses, parameters and events."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

import megatron_dcp as mdcp
from megatron_dcp.dist import DataWorld, LinkPacer
from megatron_dcp.plan import digest
from megatron_dcp.testing.cases.attention import cached_world
from megatron_dcp.testing.cases.gradients import (
    Samples,
    plan_maker,
    random_lengths,
    reference_step,
    run_step,
    whole,
    wrap,
)
from megatron_dcp.testing.models import TinyModel
from megatron_dcp.testing.plans import tiny_profile


def training_case(
    *,
    seed: int = 0,
    steps: int = 4,
    batch: int = 6,
    size: int = 40,
    wrapper: str = "bare",
    strategy: str | None = None,
    plan_ahead: int = 1,
    max_grad_norm: float | None = 0.5,
    bytes_per_s: float | None = None,
    measure: bool = False,
    longest: int = 40,
) -> dict[str, Any]:
    """Train a tiny float64 model; parameters as a digest of their values rounded to 1e-9."""
    data = Samples(random_lengths(seed, size, longest), seed)
    model = TinyModel(seed=seed)
    wrapped = wrap(model, wrapper)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1.0 / (1 + k))
    world: DataWorld = cached_world()
    engine = mdcp.initialize(
        wrapped,
        optimizer,
        cost=tiny_profile(),
        plan_fn=plan_maker(strategy, seed, False),
        scheduler=scheduler,
        max_grad_norm=max_grad_norm,
        plan_ahead=plan_ahead,
        measure=measure,
        world=world,
    )
    world.wire.pacer = None if bytes_per_s is None else LinkPacer(bytes_per_s)
    losses, norms, digests, exposed = [], [], [], []
    try:
        loader = engine.dataloader(
            data, global_batch_size=batch, lengths="lengths", seed=seed, steps=steps
        )
        for step in loader:
            losses.append(run_step(engine, step))
            norms.append(step.grad_norm)
            digests.append(digest(step.plan))
            exposed.append(step.metrics["planner_exposed_ms"])
    finally:
        world.wire.pacer = world.wire.listener = None
    return {
        "losses": losses,
        "norms": norms,
        "digests": digests,
        "exposed_ms": exposed,
        "parameters": _fingerprint(model),
        "numel": sum(p.numel() for p in model.parameters()),
        "lr": scheduler.get_last_lr()[0],
        "events": engine.take_events(),
        "communicators": world.communicators,
    }


def unstepped_case(*, wrapper: str = "bare", seed: int = 0, max_norm: float = 0.5) -> Any:
    """Steps of an optimizer that holds the head alone, beside the usual loop in one process."""
    data = Samples(random_lengths(seed, 32), seed)
    model, reference = TinyModel(seed=seed), TinyModel(seed=seed)
    wrapped = wrap(model, wrapper)
    engine = mdcp.initialize(
        wrapped, torch.optim.SGD(model.head.parameters(), lr=0.1), cost=tiny_profile(),
        plan_fn=plan_maker(None, seed, False), max_grad_norm=max_norm, world=cached_world(),
    )  # fmt: skip
    plain = torch.optim.SGD(reference.head.parameters(), lr=0.1)
    found, expected = [], []
    for step in engine.dataloader(data, global_batch_size=8, lengths="lengths", seed=seed):
        run_step(engine, step)
        found.append(step.grad_norm)
        reference_step(reference, data, step.indices, "token")
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), max_norm)
        expected.append(float(norm))
        plain.step()
        reference.zero_grad()
    head = whole(model.head.weight.detach())
    return {
        "norms": found,
        "expected": expected,
        "error": float((head - reference.head.weight).abs().max()),
        "left": [n for n, p in model.named_parameters() if p.grad is not None],
    }


def _fingerprint(model: torch.nn.Module) -> str:
    text = hashlib.sha256()
    for name, p in model.named_parameters():
        whole = p.full_tensor() if hasattr(p, "full_tensor") else p
        text.update(name.encode())
        text.update((whole.detach() * 1e9).round().to(torch.int64).numpy().tobytes())
    return text.hexdigest()[:16]
