"""A two-layer model on one placement whose samples come by exchange, against one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_dcp.dispatch import exchange
from megatron_dcp.dist import make_context, use_placement
from megatron_dcp.plan import Placement
from megatron_dcp.schemes import attention
from megatron_dcp.testing.cases.attention import cached_world, inner_blocks
from megatron_dcp.testing.gradients import gradient_error
from megatron_dcp.testing.models import TinyModel, weighted_loss_sum
from megatron_dcp.testing.plans import finish_plan, plan_request, tiny_profile
from megatron_dcp.testing.reference import dense_attention, visible

Fields = dict[str, Tensor]


def grid_sample(shape: list[int], generator: torch.Generator) -> Fields:
    """Tokens of a clip of (frames, height, width) patches, each with its place in the grid."""
    axes = [torch.arange(n, dtype=torch.int16) for n in shape]
    n = math.prod(shape)
    return {
        "ids": torch.randint(0, 64, (n,), generator=generator),
        "grid": torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).view(n, len(shape)),
        "labels": torch.randint(0, 64, (n,), generator=generator),
        "weights": torch.rand(n, generator=generator, dtype=torch.float64),
    }


def model_error(
    *,
    shapes: list[list[int]],
    scheme: str,
    inner: int,
    heads: int,
    kv_heads: int,
    causal: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """Gradient error of all parameters; samples sit on ranks that do not follow from the plan.

    Rotary positions are those of each token's place in its own grid, which travels with it.
    """
    world = cached_world()
    generator = torch.Generator().manual_seed(seed)
    items = [grid_sample(shape, generator) for shape in shapes]
    lengths = [len(x["ids"]) for x in items]
    placement = Placement(
        slot=0, first_rank=0, degree=world.size, samples=tuple(range(len(items))),
        scheme=scheme, inner_degree=inner,
    )  # fmt: skip
    profile = tiny_profile(heads=heads, kv_heads=kv_heads)
    plan = finish_plan(plan_request(lengths, world.size, profile=profile), [placement])
    world.ensure_groups(inner_blocks(0, world.size, inner))
    owners = [(3 * i + 1) % world.size for i in range(len(items))]
    owned = {i: x for i, x in enumerate(items) if owners[i] == world.rank}
    ((_, shard),) = exchange(world, plan, owners, owned)
    ctx = make_context(world, plan.placements[0], lengths)
    if ctx.filler:
        shard = {n: x.new_zeros((1, *x.shape[1:])) for n, x in shard.items()}
    with use_placement(ctx):
        found = _gradients([shard], partial(attention, causal=causal), heads, kv_heads)
    if world.size > 1:
        for x in found.values():
            world.wire.all_reduce(x, world.group)
    want = _gradients(items, partial(_dense, causal=causal), heads, kv_heads)
    error, where = gradient_error(found, want)
    return {"error": error, "where": where, "tokens": ctx.tokens}


def _dense(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return dense_attention(q, k, v, visible(q.shape[0], causal=causal))


def _gradients(
    parts: list[Fields], attend: Callable[..., Tensor], heads: int, kv_heads: int
) -> Fields:
    """Gradients of the summed loss over some parts, each run by itself."""
    model = TinyModel(seed=1, hidden=8 * heads, heads=heads, kv_heads=kv_heads)
    for x in parts:
        logits = model(x["ids"], x["grid"], attend)
        torch.autograd.backward(weighted_loss_sum(logits, x["labels"], x["weights"]))
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
