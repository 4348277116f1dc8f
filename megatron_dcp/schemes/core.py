"""What schemes share: segment lists of a placement, and attention over tokens held whole.

Shape legend: t local tokens, T tokens of the pack, H query heads, Hk KV heads, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_dcp.dist import PlacementContext
from megatron_dcp.ops import segment_attention, varlen_attention
from megatron_dcp.ops.segments import segment_tensor
from megatron_dcp.plan.shards import Span
from megatron_dcp.schemes.dropout import dropout_arguments
from megatron_dcp.schemes.masks import Mask, context_rects, is_plain, segments_between
from megatron_dcp.schemes.registry import AttentionOptions


def member_segments(
    ctx: PlacementContext, mask: Mask, query: int, key: int
) -> tuple[tuple[int, ...], ...]:
    """Segment rows between the tokens of two outer members, kept in the context."""
    name = ("segments", mask, query, key)
    if name not in ctx.cache:
        members = ctx.shards.members
        rows = segments_between(context_rects(ctx, mask), members[query], members[key])
        ctx.cache[name] = tuple(rows)
    rows_: tuple[tuple[int, ...], ...] = ctx.cache[name]
    return rows_


def member_segment_tensor(ctx: PlacementContext, mask: Mask, query: int, key: int) -> Tensor | None:
    """The same as an op's segment list, on the CPU (ops read it there); None: nothing is seen."""
    name = ("segment tensor", mask, query, key)
    if name not in ctx.cache:
        rows = member_segments(ctx, mask, query, key)
        ctx.cache[name] = segment_tensor(rows) if rows else None
    found: Tensor | None = ctx.cache[name]
    return found


def sees_everything(ctx: PlacementContext, mask: Mask) -> bool:
    """Whether the mask alone lets every member need every other's keys (no window, documents)."""
    return ctx.documents is None and mask.left < 0 and mask.right <= 0


def needs(ctx: PlacementContext, mask: Mask, query: int, key: int) -> bool:
    """Whether any query of one member sees a key of another."""
    return bool(member_segments(ctx, mask, query, key))


def attend_whole(
    q: Tensor, k: Tensor, v: Tensor, ctx: PlacementContext, options: AttentionOptions
) -> Tensor:
    """Attention where q, k, v hold every token of the pack, in order [T, heads, D]; outer is 1."""
    mask = options.mask
    dropout = dropout_arguments(options.dropout, ctx, ctx.member, [ctx.member])
    if is_plain(ctx):
        out, _ = varlen_attention(
            q,
            k,
            v,
            ctx.cu_seqlens,
            ctx.cu_seqlens,
            ctx.max_seqlen,
            ctx.max_seqlen,
            softmax_scale=options.softmax_scale,
            causal=mask.causal,
            window_size=mask.window_size,
            softcap=options.softcap,
            **dropout,
        )
        return out
    name = ("whole", mask)
    if name not in ctx.cache:
        spans = [Span(j, 0, n) for j, n in enumerate(ctx.lengths) if n]
        rows = segments_between(context_rects(ctx, mask), spans, spans)
        ctx.cache[name] = segment_tensor(rows)
    segments: Tensor = ctx.cache[name]
    out, _ = segment_attention(
        q,
        k,
        v,
        segments,
        softmax_scale=options.softmax_scale,
        softcap=options.softcap,
        **dropout,
    )
    return out


def accumulators_like(kv: Tensor) -> Tensor:
    """Zeros of kv's shape in the accumulation type."""
    dtype = torch.float64 if kv.dtype == torch.float64 else torch.float32
    return torch.zeros(kv.shape, dtype=dtype, device=kv.device)
