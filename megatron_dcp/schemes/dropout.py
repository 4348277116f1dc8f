"""Dropout of attention probabilities that belongs to the sample: what the ops need to draw it.

The mask of a pair is a function of (key, sample, query head, query position, key position), so the
ranks of a block, which see other rows and heads, draw the same masks under every scheme and degree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_dcp.dist import PlacementContext
from megatron_dcp.plan.shards import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropout:
    """probability of a pair being dropped; rng_key: 64 bits; head_offset: of the first local query
    head in the model's numbering."""

    probability: float
    rng_key: int
    head_offset: int = 0

    def from_head(self, head: int) -> Dropout:
        """For a slice of the query heads that begins at `head`."""
        return replace(self, head_offset=self.head_offset + head)


def rows_of(ctx: PlacementContext, spans: Sequence[Span]) -> tuple[Tensor, Tensor]:
    """(sample keys, positions) of the rows of some spans, in order; int64."""
    device = ctx.sample_keys.device
    counts = torch.tensor([s.stop - s.start for s in spans], dtype=torch.int64)
    samples = torch.tensor([s.sample for s in spans], dtype=torch.int64)
    positions = [torch.arange(s.start, s.stop) for s in spans]
    index = samples.repeat_interleave(counts).to(device)
    return ctx.sample_keys[index], torch.cat([torch.zeros(0, dtype=torch.int64), *positions]).to(
        device
    )


def _cached(ctx: PlacementContext, name: Any, spans: Sequence[Span]) -> tuple[Tensor, Tensor]:
    key = ("dropout rows", name)
    if key not in ctx.cache:
        ctx.cache[key] = rows_of(ctx, spans)
    found: tuple[Tensor, Tensor] = ctx.cache[key]
    return found


def dropout_arguments(
    dropout: Dropout | None, ctx: PlacementContext, query: int, keys: Sequence[int]
) -> dict[str, Any]:
    """Keyword arguments of an op whose rows are one outer member's and whose keys are those of some
    members, in the order given; none without dropout."""
    if dropout is None:
        return {}
    members = ctx.shards.members
    samples, q_positions = _cached(ctx, query, members[query])
    if len(keys) == 1:
        k_positions = _cached(ctx, keys[0], members[keys[0]])[1]
    else:
        spans = [s for m in keys for s in members[m]]
        k_positions = _cached(ctx, tuple(keys), spans)[1]
    return {
        "dropout_p": dropout.probability,
        "rng_key": dropout.rng_key,
        "sample_ids": samples,
        "q_positions": q_positions,
        "k_positions": k_positions,
        "head_offset": dropout.head_offset,
    }
