"""Scheme `local`: the whole pack is on this rank; nothing crosses ranks."""

from __future__ import annotations

from torch import Tensor

from megatron_dcp.dist import PlacementContext
from megatron_dcp.schemes.core import attend_whole
from megatron_dcp.schemes.registry import AttentionOptions, register_scheme


@register_scheme("local")
def local(
    q: Tensor, k: Tensor, v: Tensor, ctx: PlacementContext, options: AttentionOptions
) -> Tensor:
    """q [T, H, D], k and v [T, Hk, D] -> [T, H, D]."""
    return attend_whole(q, k, v, ctx, options)
