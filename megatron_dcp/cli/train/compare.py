"""The reference GPT: as calibration sees it, and under one strategy each for a comparison.

Every strategy has its own copy of the model, optimizer and engine with equal seeds, so the losses
must agree to rounding.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from typing import Any

import torch

import megatron_dcp as mdcp
from megatron_dcp.cli.train.fused import Fused
from megatron_dcp.cli.train.model import Gpt, loss_sum
from megatron_dcp.cli.train.stack import Linked, Stack
from megatron_dcp.cli.train.virtual import run_pack
from megatron_dcp.data.stdlib import TextCorpus
from megatron_dcp.dist import DataWorld, LinkPacer, PlacementContext
from megatron_dcp.runtime.contender import EngineContender, plan_on_rank_0, timed_by_clock
from megatron_dcp.runtime.prepare import PlanFn


def gpt_stack(model: Gpt, *, max_length: int, say: Any) -> Stack:
    """The reference GPT as calibration sees it."""

    def run(context: PlacementContext, recompute: int) -> None:
        context.placement = replace(context.placement, recompute=recompute)
        run_pack(model, context)

    shape = model.config.shape(next(model.parameters()).element_size())
    parameters = list(model.parameters())
    return Stack(run=run, parameters=parameters, shape=shape, max_length=max_length, say=say)


def native_contender(
    strategy: str,
    *,
    world: DataWorld,
    model: Gpt,
    corpus: TextCorpus,
    linked: Linked,
    global_batch: int,
    seed: int,
    lr: float,
    ranks_per_node: int | None = None,
    shape_quantum: int = 0,
    fused: Fused | None = None,
    plan_ahead: int = 1,
    plan_fn: PlanFn | None = None,
) -> EngineContender:
    """A copy of `model` under a strategy. plan_ahead 0 plans between the steps of a comparison,
    where nothing is timed. Plans with a time limit are made by rank 0, always between steps.
    plan_fn: makes the plans instead of the registered strategy."""
    own = copy.deepcopy(model)
    optimizer = (fused or Fused()).adamw(own.parameters(), lr)
    limited = timed_by_clock(strategy)
    engine = mdcp.initialize(
        own, optimizer, cost=linked.profile, strategy=strategy, ranks_per_node=ranks_per_node,
        measure=True, plan_ahead=0 if limited else plan_ahead,
        plan_fn=functools.partial(plan_on_rank_0, world, strategy) if limited else plan_fn,
    )  # fmt: skip
    engine.wrap_layers(own.layers)
    if linked.bytes_per_s is not None:
        engine.world.wire.pacer = LinkPacer(linked.bytes_per_s)
    loader = engine.dataloader(
        corpus, global_batch_size=global_batch, lengths="lengths", seed=seed,
        shape_quantum=shape_quantum,
    )  # fmt: skip

    def loss(mb: Any) -> torch.Tensor:
        return loss_sum(own(**mb.inputs), mb.labels)

    return EngineContender(strategy, engine, iter(loader), loss)
