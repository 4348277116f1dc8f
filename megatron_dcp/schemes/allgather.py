"""Scheme `allgather`: every rank gathers the keys and values that its queries see.

Best for short shards: one exchange instead of many steps. KV heads are gathered in groups, the next
group under way while this one is computed, so that only two groups are held at once. Backward
gathers again and brings each member's gradient home, summed in member order.

Shape legend: t local tokens, S tokens gathered, H query heads, Hk KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_dcp.dist import Pending, PlacementContext
from megatron_dcp.ops import (
    new_accumulators,
    segment_attention_backward,
    segment_attention_forward,
)
from megatron_dcp.ops.segments import segment_tensor
from megatron_dcp.schemes.core import accumulators_like, needs
from megatron_dcp.schemes.dropout import dropout_arguments
from megatron_dcp.schemes.masks import Mask, context_rects, segments_between
from megatron_dcp.schemes.registry import AttentionOptions, register_scheme

HEAD_GROUPS = 4  # at most; a group holds at least one KV head


def _sources(ctx: PlacementContext, mask: Mask) -> list[int]:
    """Members whose keys this member's queries see, ascending; itself always."""
    me = ctx.member
    return [m for m in range(ctx.outer) if m == me or needs(ctx, mask, me, m)]


def _targets(ctx: PlacementContext, mask: Mask) -> list[int]:
    """Other members that see this member's keys."""
    return [m for m in range(ctx.outer) if m != ctx.member and needs(ctx, mask, m, ctx.member)]


def _segments(ctx: PlacementContext, mask: Mask) -> Tensor:
    """Segments between the local queries and the gathered keys, members in ascending order."""
    name = ("gathered", mask)
    if name not in ctx.cache:
        members = ctx.shards.members
        spans = [s for m in _sources(ctx, mask) for s in members[m]]
        rows = segments_between(context_rects(ctx, mask), members[ctx.member], spans)
        ctx.cache[name] = segment_tensor(rows)
    found: Tensor = ctx.cache[name]
    return found


def _dropout(ctx: PlacementContext, options: AttentionOptions, head: int) -> dict[str, Any]:
    """Dropout of the local queries, from a query head on, over the gathered keys."""
    own = options.from_head(head)
    return dropout_arguments(own.dropout, ctx, ctx.member, _sources(ctx, options.mask))


def _head_groups(kv_heads: int) -> list[slice]:
    groups = min(HEAD_GROUPS, kv_heads)
    cuts = [i * kv_heads // groups for i in range(groups + 1)]
    return [slice(a, b) for a, b in pairwise(cuts)]


def _start_gather(
    kv: Tensor, heads: slice, ctx: PlacementContext, mask: Mask, kind: str
) -> tuple[Tensor, Pending]:
    """kv [t, 2, Hk, D]: gather some heads of all sources: ([S, 2, heads, D], transfer)."""
    mine = kv[:, :, heads].contiguous()
    sources = _sources(ctx, mask)
    counts = [ctx.member_tokens(m) for m in sources]
    gathered = mine.new_empty((sum(counts), *mine.shape[1:]))
    parts = dict(zip(sources, torch.split(gathered, counts), strict=True))
    parts[ctx.member].copy_(mine)
    pending = ctx.world.wire.start_exchange(
        [(mine, ctx.peer(m)) for m in _targets(ctx, mask)],
        [(parts[m], ctx.peer(m)) for m in sources if m != ctx.member],
        ctx.world.group,
        kind,
    )
    return gathered, pending


def _gathers(
    kv: Tensor, ctx: PlacementContext, mask: Mask, kind: str
) -> Iterator[tuple[slice, Tensor]]:
    """Head groups with their gathered kv, the next one under way."""
    groups = _head_groups(kv.shape[2])
    coming = _start_gather(kv, groups[0], ctx, mask, kind)
    for i, heads in enumerate(groups):
        gathered, pending = coming
        pending.wait()
        if i + 1 < len(groups):
            coming = _start_gather(kv, groups[i + 1], ctx, mask, kind)
        yield heads, gathered


def _start_home(
    dkv: Tensor, ctx: PlacementContext, mask: Mask, kind: str
) -> tuple[list[Tensor], Pending]:
    """Send each source's part of dkv [S, 2, heads, D] home; the parts for us, in member order."""
    sources, targets = _sources(ctx, mask), _targets(ctx, mask)
    counts = [ctx.member_tokens(m) for m in sources]
    parts = dict(zip(sources, torch.split(dkv, counts), strict=True))
    arriving = {m: torch.empty_like(parts[ctx.member]) for m in targets}
    pending = ctx.world.wire.start_exchange(
        [(parts[m], ctx.peer(m)) for m in sources if m != ctx.member],
        [(arriving[m], ctx.peer(m)) for m in targets],
        ctx.world.group,
        kind,
    )
    arriving[ctx.member] = parts[ctx.member]
    return [arriving[m] for m in sorted(arriving)], pending


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(
        fn: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        ctx: PlacementContext,
        options: AttentionOptions,
    ) -> Tensor:
        kv = torch.stack((k, v), dim=1)
        ratio = q.shape[1] // k.shape[1]
        segments = _segments(ctx, options.mask)
        out, lse = new_accumulators(q)
        for heads, gathered in _gathers(kv, ctx, options.mask, "allgather"):
            rows = slice(heads.start * ratio, heads.stop * ratio)
            part, part_lse = new_accumulators(q[:, rows])
            segment_attention_forward(
                q[:, rows],
                gathered[:, 0],
                gathered[:, 1],
                segments,
                part,
                part_lse,
                softmax_scale=options.softmax_scale,
                softcap=options.softcap,
                **_dropout(ctx, options, rows.start),
            )
            out[:, rows], lse[rows] = part, part_lse
            del gathered  # before the group after the next is made
        result = out.to(q.dtype)
        fn.save_for_backward(q, kv, result, lse)
        fn.placement, fn.options = ctx, options
        return result

    @staticmethod
    @once_differentiable
    def backward(fn: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, out, lse = fn.saved_tensors
        ctx, options = fn.placement, fn.options
        ratio = q.shape[1] // kv.shape[2]
        segments = _segments(ctx, options.mask)
        dq, homes = accumulators_like(q), []
        kind = "allgather.backward"
        for heads, gathered in _gathers(kv, ctx, options.mask, kind):
            rows = slice(heads.start * ratio, heads.stop * ratio)
            dkv, part = accumulators_like(gathered), accumulators_like(q[:, rows])
            segment_attention_backward(
                dout[:, rows].contiguous(),
                q[:, rows],
                gathered[:, 0],
                gathered[:, 1],
                out[:, rows].contiguous(),
                lse[rows].contiguous(),
                segments,
                part,
                dkv[:, 0],
                dkv[:, 1],
                softmax_scale=options.softmax_scale,
                softcap=options.softcap,
                **_dropout(ctx, options, rows.start),
            )
            dq[:, rows] = part
            del gathered
            homes.append(_start_home(dkv, ctx, options.mask, kind))
        grads = []
        for parts, pending in homes:
            pending.wait()
            total = parts[0].clone()
            for x in parts[1:]:
                total += x
            grads.append(total)
        dkv = torch.cat(grads, dim=2)
        return dq.to(q.dtype), dkv[:, 0].to(kv.dtype), dkv[:, 1].to(kv.dtype), None, None


@register_scheme("allgather")
def allgather(
    q: Tensor, k: Tensor, v: Tensor, ctx: PlacementContext, options: AttentionOptions
) -> Tensor:
    """q [t, H, D], k and v [t, Hk, D] -> [t, H, D]."""
    out: Tensor = _Allgather.apply(q, k, v, ctx, options)  # type: ignore[no-untyped-call]
    return out
