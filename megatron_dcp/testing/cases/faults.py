"""Ranks that disagree or cannot go on: what every rank is told."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

import torch

import megatron_dcp as mdcp
from megatron_dcp.dist import DataWorld
from megatron_dcp.errors import MdcpError, TransferError
from megatron_dcp.plan import StepPlan
from megatron_dcp.planner import PlanRequest
from megatron_dcp.schemes import attention
from megatron_dcp.testing.cases.attention import block_context, cached_world
from megatron_dcp.testing.cases.gradients import Samples, run_step
from megatron_dcp.testing.models import TinyModel, weighted_loss_sum
from megatron_dcp.testing.plans import plan_request, random_plan, tiny_profile


class Torn(Samples):
    """One sample of it cannot be read; or all are drawn anew at every reading."""

    torn, drawn = -1, False

    def __getitem__(self, index: int) -> Any:
        if index == self.torn:
            raise OSError("disk error 5")
        item = dict(super().__getitem__(index))
        if self.drawn:
            item["input_ids"] = torch.randint(0, 64, item["input_ids"].shape)
        return item


def disagreement(*, fault: str, odd: int = 1) -> dict[str, Any]:
    """Run steps with a fault on one rank; returns what this rank was told and how far it came."""
    world = cached_world()
    here = world.rank == odd
    lengths = [9, 4, 30, 7, 12, 5, 9, 9]
    if fault == "lengths" and here:
        lengths = [9, 4, 31, 7, 12, 5, 9, 9]
    data = Torn([9] * 8 if fault == "order" else lengths, 0)
    data.torn = 2 if fault == "unreadable" else -1
    data.drawn = fault == "drawn"

    def make(request: PlanRequest) -> StepPlan:
        plan = random_plan(request, 3)
        if fault == "plan" and here:
            first = replace(plan.placements[0], time_us=plan.placements[0].time_us + 1)
            return replace(plan, placements=(first, *plan.placements[1:]))
        if fault == "planner" and here:
            raise RuntimeError("planner crashed")
        if fault == "other workload":
            return random_plan(plan_request([3, 3], world.size), 0)
        return plan

    engine = mdcp.initialize(
        TinyModel(), cost=tiny_profile(), world=world, plan_fn=make, plan_ahead=1
    )
    seed = world.rank if fault == "order" else 0
    loader = engine.dataloader(data, global_batch_size=4, lengths="lengths", seed=seed)
    done = 0
    sent = dict(world.wire.sent)
    try:
        for step in loader:
            run_step(engine, step)
            done += 1
    except MdcpError as error:
        kinds = {k for k, n in world.wire.sent.items() if n != sent.get(k, 0)}
        return {
            "type": type(error).__name__,
            "error": str(error),
            "done": done,
            "sent": sorted(kinds),
        }
    except RuntimeError as error:
        return {"type": type(error).__name__, "error": str(error), "done": done, "sent": []}
    return {"type": "", "error": "", "done": done, "sent": []}


def peer_killed(*, scheme: str, inner: int, victim: int) -> dict[str, Any]:
    """One rank of a block dies inside a scheme; what the others are told, and how long it took."""
    world = DataWorld(timeout_s=20)
    ctx = block_context(world, [400], scheme, inner)
    q, k, v = (torch.randn(ctx.rows, h, 8, requires_grad=True) for h in (4, 2, 2))
    attention(q, k, v, placement=ctx)  # connections stand
    begin = time.monotonic()
    if world.rank == victim:
        os._exit(9)
    try:
        for _ in range(50):
            torch.autograd.backward(attention(q, k, v, placement=ctx), torch.ones_like(q))
    except TransferError as error:
        return {"error": str(error), "seconds": time.monotonic() - begin}
    return {"error": "", "seconds": time.monotonic() - begin}


def killed_in_a_step(*, when: str, victim: int) -> dict[str, Any]:
    """A rank dies before its first message of a step, or after its last of the microbatches."""
    world = DataWorld(timeout_s=20)
    model = TinyModel(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = mdcp.initialize(
        model, optimizer, cost=tiny_profile(), world=world, strategy="packed:2", plan_ahead=0
    )
    loader = engine.dataloader(
        Samples([9, 4, 30, 7, 12, 5, 9, 9], 0), global_batch_size=4, lengths="lengths"
    )
    begin, done = time.monotonic(), 0
    try:
        for step in loader:
            if world.rank == victim and when == "before" and step.index == 1:
                os._exit(9)
            for mb in step:
                mb.backward(weighted_loss_sum(model(**mb.inputs), mb.labels, mb.weights))
            if world.rank == victim and when == "after" and step.index == 1:
                os._exit(9)
            step.finish()
            done += 1
    except TransferError as error:
        return {"error": str(error), "done": done, "seconds": time.monotonic() - begin}
    return {"error": "", "done": done, "seconds": time.monotonic() - begin}
