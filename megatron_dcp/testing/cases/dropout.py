"""Dropout and noise keyed by sample: a step under any plan equals one process, sample by sample."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import megatron_dcp as mdcp
from megatron_dcp.dispatch import ReadOptions, read_sample
from megatron_dcp.dist import DataWorld, make_context, use_placement
from megatron_dcp.plan import Placement, StepPlan
from megatron_dcp.planner import PlanRequest
from megatron_dcp.testing.cases.attention import cached_world
from megatron_dcp.testing.cases.gradients import Samples, random_lengths
from megatron_dcp.testing.gradients import gradient_error
from megatron_dcp.testing.models import TinyModel, weighted_loss_sum
from megatron_dcp.testing.plans import random_plan, tiny_profile

SEED = 11
SCHEMES = ["local", "ulysses", "ring", "allgather", "hybrid"]


class DropoutModel(TinyModel):
    """The tiny model with dropout behind every MLP, and of attention probabilities."""

    def __init__(self, attention_dropout: float = 0.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.attention_dropout = attention_dropout
        for layer in self.layers:
            assert isinstance(layer.mlp, nn.Sequential)
            layer.mlp.append(nn.Dropout(0.3))

    def loss(self, inputs: dict[str, Tensor], labels: Tensor, weights: Tensor) -> Tensor:
        with mdcp.sample_dropout(SEED):
            attend = partial(mdcp.attention, dropout_p=self.attention_dropout)
            return weighted_loss_sum(self(**inputs, attend=attend), labels, weights)


def dropout_case(
    *, seed: int, samples: int = 8, attention_dropout: float = 0.0, schemes: list[str] | None = None
) -> dict[str, Any]:
    """Gradient error of one step with dropout on, under a random plan."""
    data = Samples(random_lengths(seed, samples, 30), seed)
    model, reference = (DropoutModel(attention_dropout, seed=seed) for _ in range(2))

    def make(request: PlanRequest) -> StepPlan:
        return random_plan(request, seed, schemes=schemes or SCHEMES)

    engine = mdcp.initialize(
        model, None, cost=tiny_profile(), plan_fn=make, plan_ahead=0,
        world=cached_world(),
    )  # fmt: skip
    engine.wrap_layers(model.layers)
    step = next(iter(engine.dataloader(data, global_batch_size=samples, lengths="lengths")))
    for mb in step:
        mb.backward(model.loss(mb.inputs, mb.labels, mb.weights))
    loss = step.finish()
    expected = _reference(reference, data, step.indices, step.index)
    grads = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    error, where = gradient_error(found, grads)
    return {
        "error": error,
        "where": where,
        "loss_error": abs(loss - expected) / abs(expected),
        "schemes": sorted({p.scheme for p in step.plan.placements}),
        "recomputed": max((mb.recompute for mb in step.microbatches), default=0),
    }


def _reference(model: DropoutModel, data: Samples, indices: list[int], step: int) -> float:
    """One sample at a time on one process; gradients of the mean over all weighted tokens."""
    world = DataWorld(alone=True)
    items = [read_sample(data, i, data.lengths[i], ReadOptions()) for i in indices]
    total = sum(float(s.weights.sum()) for s in items)
    value = 0.0
    for index, item in zip(indices, items, strict=True):
        placement = Placement(slot=0, first_rank=0, degree=1, samples=(0,))
        context = make_context(world, placement, [item.length], sample_keys=[index], step=step)
        inputs = {**item.inputs, "position_ids": context.position_ids}
        with use_placement(context):
            loss = model.loss(inputs, item.labels, item.weights) / total
            torch.autograd.backward(loss)
        value += float(loss.detach())
    return value


def noise_case(*, lengths: list[int], degree: int) -> dict[str, Any]:
    """Noise of every token of a pack shared by `degree` ranks, by (sample, position)."""
    world = cached_world()
    scheme = "local" if degree == 1 else "ring"
    placement = Placement(
        slot=0, first_rank=0, degree=degree, samples=tuple(range(len(lengths))), scheme=scheme
    )
    if world.rank >= degree:
        return {}
    context = make_context(world, placement, lengths, step=3)
    generator = mdcp.sample_generator(seed=5, site=2, placement=context)
    rows = torch.cat((generator.normal(3, dtype=torch.float64),
                      generator.per_sample(2, dtype=torch.float64)), dim=1)  # fmt: skip
    where = zip(context.sample_ids.tolist(), context.position_ids.tolist(), strict=True)
    return {f"{s}/{p}": row for (s, p), row in zip(where, rows.tolist(), strict=True)}
