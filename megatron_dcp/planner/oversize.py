"""Samples that fit on no block: reported, dropped or cut, never silently.

The largest sample that fits is the one whose bytes on the widest legal degree, with every layer
recomputed, stay within the budget. Dropping and cutting depend on lengths, topology, profile and
budget alone, so all ranks do the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_dcp.config import Oversize
from megatron_dcp.cost import CostModel, Pack
from megatron_dcp.errors import ConfigError, PlanError


def most_bytes_needed(cost: CostModel, length: int, *, recompute: bool) -> int:
    """Bytes per rank of one sample at its leanest: any degree and scheme, all layers or none
    recomputed."""
    return min(
        cost.bytes(Pack(length), degree, mode, layers)
        for degree in cost.topology.degrees()
        for mode in cost.modes(degree)
        for layers in {0, cost.layers if recompute else 0}
    )


def largest_sample(cost: CostModel, budget_bytes: int, limit: int, *, recompute: bool) -> int:
    """The longest sample, at most `limit` tokens, that fits at all (0: none does)."""
    low, high = 0, limit + 1  # low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        if most_bytes_needed(cost, middle, recompute=recompute) <= budget_bytes:
            low = middle
        else:
            high = middle
    return low


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Positions in the batch that stay, with their lengths; dropped and cut positions."""

    kept: tuple[int, ...]
    lengths: tuple[int, ...]
    dropped: tuple[int, ...] = ()
    cut: tuple[int, ...] = ()


def fit_samples(
    lengths: Sequence[int],
    indices: Sequence[int],
    cost: CostModel,
    budget_bytes: int,
    policy: Oversize,
    *,
    recompute: bool,
) -> Fitted:
    """Apply the policy to a batch; `indices` name the samples in messages."""
    longest = max(lengths)
    if most_bytes_needed(cost, longest, recompute=recompute) <= budget_bytes:
        return Fitted(kept=tuple(range(len(lengths))), lengths=tuple(lengths))
    most = largest_sample(cost, budget_bytes, longest, recompute=recompute)
    over = [i for i, n in enumerate(lengths) if n > most]
    if policy == "error" or most < 1:
        i = over[0]
        needed = most_bytes_needed(cost, lengths[i], recompute=recompute)
        raise PlanError(
            f"sample {indices[i]} of {lengths[i]} tokens fits on no block: at its leanest (all "
            f"{cost.topology.data_ranks} ranks tried{', full recompute' if recompute else ''}) it "
            f"needs {needed} bytes per rank, the budget is {budget_bytes}; the longest that fits "
            f"has {most} tokens. Raise the memory budget, or pass oversize='truncate' or 'drop'"
        )
    if policy == "truncate":
        cut = tuple(min(n, most) for n in lengths)
        return Fitted(kept=tuple(range(len(lengths))), lengths=cut, cut=tuple(over))
    if policy != "drop":
        raise ConfigError(f"oversize={policy!r}: use error, drop or truncate")
    kept = tuple(i for i, n in enumerate(lengths) if n <= most)
    if not kept:
        raise PlanError(
            f"every sample of the batch is longer than the {most} tokens that fit; raise the "
            "memory budget or pass oversize='truncate'"
        )
    return Fitted(kept=kept, lengths=tuple(lengths[i] for i in kept), dropped=tuple(over))
