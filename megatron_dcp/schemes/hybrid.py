"""Scheme `hybrid`: ulysses over `inner_degree` ranks of a node, ring over the groups.

After the all-to-all each rank holds all tokens of its member with some heads; ranks of equal inner
rank form the rings. KV heads are repeated only as far as the all-to-all needs it.
"""

from __future__ import annotations

from torch import Tensor

from megatron_dcp.dist import PlacementContext
from megatron_dcp.schemes.registry import AttentionOptions, register_scheme
from megatron_dcp.schemes.ring import ring_attention
from megatron_dcp.schemes.ulysses import first_head, to_heads, to_tokens


@register_scheme("hybrid")
def hybrid(
    q: Tensor, k: Tensor, v: Tensor, ctx: PlacementContext, options: AttentionOptions
) -> Tensor:
    """q [t, H, D], k and v [t, Hk, D] -> [t, H, D]."""
    own = options.from_head(first_head(q, ctx))
    return to_tokens(ring_attention(*to_heads(q, k, v, ctx), ctx, own), ctx)
