"""Scheme `ulysses`: tokens of all ranks, some heads each, by all-to-all (Jacobs et al., 2023).

Every rank holds any number of tokens, also none. One all-to-all carries q, k and v of each
destination in one buffer; one brings the output back. With more ranks than KV heads each KV head is
repeated rep = u / Hk times, so that the rank that holds query heads j also holds their KV head.

Shape legend: t local tokens, T tokens of the group, u ranks of the group, H query heads, Hk KV
heads, D head dim, w row width in elements.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_dcp.dist import PlacementContext
from megatron_dcp.errors import PlanError
from megatron_dcp.schemes.core import attend_whole
from megatron_dcp.schemes.registry import AttentionOptions, register_scheme


def _group_tokens(ctx: PlacementContext) -> list[int]:
    """Tokens of each rank of this rank's all-to-all group."""
    first = ctx.member * ctx.inner
    return list(ctx.shards.tokens[first : first + ctx.inner])


def _scatter(x: Tensor, ctx: PlacementContext, kind: str) -> Tensor:
    """[u, t, w] -> [T, w]: row block j goes to rank j; rows of all ranks arrive in rank order."""
    rows = _group_tokens(ctx)
    out = x.new_empty((sum(rows), x.shape[2]))
    send = x.contiguous().view(-1, x.shape[2])
    counts = [x.shape[1]] * ctx.inner
    return ctx.world.wire.all_to_all(out, send, rows, counts, ctx.inner_group(), kind)


def _gather(x: Tensor, ctx: PlacementContext, kind: str) -> Tensor:
    """[T, w] -> [u, t, w]: the inverse of `_scatter`."""
    rows = _group_tokens(ctx)
    mine = rows[ctx.inner_rank]
    out = x.new_empty((ctx.inner * mine, x.shape[1]))
    group, counts = ctx.inner_group(), [mine] * ctx.inner
    ctx.world.wire.all_to_all(out, x.contiguous(), counts, rows, group, kind)
    return out.view(ctx.inner, mine, x.shape[1])


class _ScatterHeads(torch.autograd.Function):
    @staticmethod
    def forward(fn: Any, x: Tensor, ctx: PlacementContext) -> Tensor:
        fn.placement = ctx
        return _scatter(x, ctx, "ulysses")

    @staticmethod
    @once_differentiable
    def backward(fn: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gather(grad, fn.placement, "ulysses.backward"), None


class _GatherHeads(torch.autograd.Function):
    @staticmethod
    def forward(fn: Any, x: Tensor, ctx: PlacementContext) -> Tensor:
        fn.placement = ctx
        return _gather(x, ctx, "ulysses")

    @staticmethod
    @once_differentiable
    def backward(fn: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _scatter(grad, fn.placement, "ulysses.backward"), None


def repeats(heads: int, kv_heads: int, ranks: int) -> int:
    """How often each KV head is repeated; PlanError where the heads cannot be cut."""
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        raise PlanError(
            f"ulysses over {ranks} ranks asked, the model has {heads} heads and {kv_heads} KV "
            "heads; it must divide the heads, and divide or be a multiple of the KV heads: use "
            "another degree, ring, allgather or hybrid"
        )
    return max(1, ranks // kv_heads)


def first_head(q: Tensor, ctx: PlacementContext) -> int:
    """The first query head that this rank has after the all-to-all; q [t, H, D]."""
    return q.shape[1] // ctx.inner * ctx.inner_rank


def to_heads(
    q: Tensor, k: Tensor, v: Tensor, ctx: PlacementContext
) -> tuple[Tensor, Tensor, Tensor]:
    """Local shards [t, H, D], [t, Hk, D] -> [T, H/u, D], [T, Hk*rep/u, D] of the group's tokens."""
    u, t, dim = ctx.inner, q.shape[0], q.shape[2]
    rep = repeats(q.shape[1], k.shape[1], u)
    if rep > 1:
        k, v = k.repeat_interleave(rep, dim=1), v.repeat_interleave(rep, dim=1)
    hq, hk = q.shape[1] // u, k.shape[1] // u
    parts = (q.reshape(t, u, hq, dim), k.reshape(t, u, hk, dim), v.reshape(t, u, hk, dim))
    x = torch.cat(parts, dim=2).transpose(0, 1).reshape(u, t, (hq + 2 * hk) * dim)
    y: Tensor = _ScatterHeads.apply(x, ctx)  # type: ignore[no-untyped-call]
    y = y.view(-1, hq + 2 * hk, dim)
    return y[:, :hq], y[:, hq : hq + hk], y[:, hq + hk :]


def to_tokens(out: Tensor, ctx: PlacementContext) -> Tensor:
    """[T, H/u, D] of the group's tokens -> the local shard [t, H, D]."""
    heads, dim = out.shape[1], out.shape[2]
    x: Tensor = _GatherHeads.apply(out.reshape(-1, heads * dim), ctx)  # type: ignore[no-untyped-call]
    t = x.shape[1]
    return x.view(ctx.inner, t, heads, dim).transpose(0, 1).reshape(t, ctx.inner * heads, dim)


@register_scheme("ulysses")
def ulysses(
    q: Tensor, k: Tensor, v: Tensor, ctx: PlacementContext, options: AttentionOptions
) -> Tensor:
    """q [t, H, D], k and v [t, Hk, D] -> [t, H, D]."""
    own = options.from_head(first_head(q, ctx))
    return to_tokens(attend_whole(*to_heads(q, k, v, ctx), ctx, own), ctx)
