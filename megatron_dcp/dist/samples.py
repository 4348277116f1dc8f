"""Sums per sample over the ranks of a block: what losses that are defined per sample need."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_dcp.dist.context import PlacementContext


def sum_by_sample(rows: Tensor, ctx: PlacementContext, start: int = 0) -> Tensor:
    """Sum of this rank's rows of each sample: rows [t or more, C] -> [samples, C].

    start: which of the rank's rows comes first, for a slice of them. Rows beyond the rank's tokens
    (fillers, padding) are left out. Differentiable; local.
    """
    index = ctx.sample_index[: ctx.tokens][start : start + len(rows)]
    zero = rows.new_zeros(len(ctx.lengths), rows.shape[1])
    return zero.index_add(0, index, rows[: len(index)])


def sum_over_block(x: Tensor, ctx: PlacementContext, purpose: str) -> Tensor:
    """Sum of equal-shaped tensors over the ranks of the block, by point-to-point on the data group.

    Rank r's part goes to every other member; blocks are small and the tensors too. No gradients.
    """
    if ctx.degree == 1:
        return x
    world, first = ctx.world, ctx.placement.first_rank
    others = [first + i for i in range(ctx.degree) if i != ctx.block_rank]
    parts = {peer: torch.empty_like(x) for peer in others}
    world.wire.start_exchange(
        [(x, peer) for peer in others], [(parts[p], p) for p in others], world.group, purpose
    ).wait()
    parts[world.rank] = x
    total = torch.zeros_like(x)
    for rank in sorted(parts):  # one order on every rank
        total = total + parts[rank]
    return total
