"""Devices that hold less than the plan believes: what a step does then."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import megatron_dcp as mdcp
from megatron_dcp.errors import OutOfMemoryError
from megatron_dcp.plan import digest
from megatron_dcp.testing.cases.attention import cached_world
from megatron_dcp.testing.cases.gradients import (
    Samples,
    random_lengths,
    reference_step,
    whole,
    wrap,
)
from megatron_dcp.testing.gradients import gradient_error
from megatron_dcp.testing.models import TinyModel, weighted_loss_sum
from megatron_dcp.testing.plans import tiny_profile


def small_device_case(
    *,
    seed: int = 0,
    wrapper: str = "bare",
    strategy: str = "dcp",
    capacity: int,
    where: str = "forward",
    victims: list[int] | None = None,
    steps: int = 2,
    plan_ahead: int = 1,
    samples: int = 12,
    lockstep: str = "auto",
    measure: bool = False,
) -> dict[str, Any]:
    """Train where placements above `capacity` bytes fail on some ranks, as an allocator would.

    where: forward (before the model's first layer), loss (after the forward), backward.
    """
    world = cached_world()
    data = Samples(random_lengths(seed, 4 * samples, 60), seed)
    model, reference = TinyModel(seed=seed), TinyModel(seed=seed)
    wrapped = wrap(model, wrapper)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-2)
    engine = mdcp.initialize(
        wrapped, optimizer, cost=tiny_profile(), strategy=strategy, memory=150e3 / 1e9,
        plan_ahead=plan_ahead, world=world, lockstep=lockstep, measure=measure,
    )  # fmt: skip
    failing = world.rank in (victims if victims is not None else range(world.size))
    failures = 0

    def fail(mb: Any, here: str) -> None:
        nonlocal failures
        if failing and where == here and mb.placement.bytes > capacity and not mb.dummy:
            failures += 1
            raise torch.OutOfMemoryError(f"made up: {mb.placement.bytes} bytes asked")

    def loss_fn(mb: Any) -> Tensor:
        fail(mb, "forward")
        loss = weighted_loss_sum(wrapped(**mb.inputs), mb.labels, mb.weights)
        fail(mb, "loss")
        if where == "backward":
            loss.register_hook(lambda g: fail(mb, "backward"))  # type: ignore[no-untyped-call]
        return loss

    grads: dict[str, Tensor] = {}

    def keep(*_: Any) -> None:
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        grads.update({n: whole(g).clone() for n, g in found.items()})

    optimizer.register_step_pre_hook(keep)
    loader = engine.dataloader(
        data, global_batch_size=samples, lengths="lengths", seed=seed, steps=steps
    )
    out: dict[str, Any] = {"losses": [], "errors": [], "digests": [], "budgets": [], "events": []}
    for step in loader:
        drawn = list(step.indices)
        grads.clear()
        try:
            loss = step.run(loss_fn)
        except OutOfMemoryError as error:
            return {**out, "failures": failures, "fatal": str(error)}
        assert step.indices == drawn
        expected, wanted = reference_step(reference, data, drawn, "token")
        out["errors"].append(gradient_error(grads, wanted)[0])
        out["losses"].append((loss, expected))
        out["digests"].append(digest(step.plan))
        out["budgets"].append(step.plan.budget_bytes)
        with torch.no_grad():
            for p in reference.parameters():
                if p.grad is not None:
                    p.sub_(1e-2 * p.grad)
                    p.grad = None
    out["tokens"] = sum(
        e.get("tokens", 0) for e in engine.take_events() if e["kind"] == "placement"
    )
    return {**out, "failures": failures, "fatal": ""}
