"""Scheme `ring`: keys and values travel, queries stay (Liu et al., 2023), zigzag, no padding.

Forward merges every step into one running (out, lse) in the accumulation type, in place. Backward
sends the keys and values round again and their gradients home. GQA: the Hk heads travel as they
are. Degrees, lengths and shard sizes are free; a shard may be empty.

Shape legend: t local tokens of the member, H query heads, Hk KV heads, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_dcp.dist import PlacementContext
from megatron_dcp.ops import (
    new_accumulators,
    segment_attention_backward,
    segment_attention_forward,
)
from megatron_dcp.schemes.core import accumulators_like, member_segment_tensor
from megatron_dcp.schemes.couriers import GradientCourier, kv_steps
from megatron_dcp.schemes.dropout import dropout_arguments
from megatron_dcp.schemes.registry import AttentionOptions, register_scheme


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        fn: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        ctx: PlacementContext,
        options: AttentionOptions,
    ) -> Tensor:
        kv = torch.stack((k, v))
        out, lse = new_accumulators(q)
        for member, held in kv_steps(kv, ctx, options.mask, "ring"):
            segments = member_segment_tensor(ctx, options.mask, ctx.member, member)
            if held is not None and segments is not None:
                segment_attention_forward(
                    q,
                    held[0],
                    held[1],
                    segments,
                    out,
                    lse,
                    softmax_scale=options.softmax_scale,
                    softcap=options.softcap,
                    **dropout_arguments(options.dropout, ctx, ctx.member, [member]),
                )
        result = out.to(q.dtype)
        fn.save_for_backward(q, kv, result, lse)
        fn.placement, fn.options = ctx, options
        return result

    @staticmethod
    @once_differentiable
    def backward(fn: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, out, lse = fn.saved_tensors
        ctx, options = fn.placement, fn.options
        dout = dout.contiguous()
        dq = accumulators_like(q)
        courier = GradientCourier(ctx, options.mask, "ring.backward")
        for member, held in kv_steps(kv, ctx, options.mask, "ring.backward"):
            if held is None:
                courier.give(member, None)
                continue
            dkv = accumulators_like(held)
            segments = member_segment_tensor(ctx, options.mask, ctx.member, member)
            if segments is not None:
                segment_attention_backward(
                    dout,
                    q,
                    held[0],
                    held[1],
                    out,
                    lse,
                    segments,
                    dq,
                    dkv[0],
                    dkv[1],
                    softmax_scale=options.softmax_scale,
                    softcap=options.softcap,
                    **dropout_arguments(options.dropout, ctx, ctx.member, [member]),
                )
            courier.give(member, dkv)
        dk, dv = courier.home()
        return dq.to(q.dtype), dk.to(kv.dtype), dv.to(kv.dtype), None, None


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, ctx: PlacementContext, options: AttentionOptions
) -> Tensor:
    """Ring over the outer members; q, k, v hold all tokens of this rank's member."""
    out: Tensor = _Ring.apply(q, k, v, ctx, options)  # type: ignore[no-untyped-call]
    return out


@register_scheme("ring")
def ring(
    q: Tensor, k: Tensor, v: Tensor, ctx: PlacementContext, options: AttentionOptions
) -> Tensor:
    """q [t, H, D], k and v [t, Hk, D] -> [t, H, D]."""
    return ring_attention(q, k, v, ctx, options)
