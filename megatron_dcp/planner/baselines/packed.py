"""`packed`: sequence packing on one fixed degree.

Source: sequence packing as in Krell et al., "Efficient Sequence Packing without
Cross-contamination" (2021), and the packed parallel of any-size video training: every pack holds as
many samples as memory allows, every pack runs on the same degree, and a loader balances tokens.

First-fit decreasing over the whole batch to the tokens that fit without recompute, or, where the
packs then do not divide evenly over the N/d blocks, as many packs of near equal tokens as do (the
better of the two; a run would choose its batch so). A longer sample is alone, with the least
recompute that fits. Then the packs, largest first, each to the block with the fewest tokens so far.
`packed:D` fixes the degree; bare `packed` takes the smallest power of two on which the longest
sample fits without recompute, at most N.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_dcp.planner.packing import (
    Slots,
    balanced_packs,
    best_of,
    blocks_of,
    deal_by_tokens,
    degree_of_longest,
    first_fit_decreasing,
    fixed_degree,
)
from megatron_dcp.planner.pricing import Pricer, place_slots
from megatron_dcp.planner.registry import Draft, PlanRequest


def packed(request: PlanRequest, parameter: str | None) -> Draft:
    """`packed` or `packed:D`. Raises PlanError when the longest sample does not fit the degree."""
    pricer = Pricer(request)
    if parameter is None:
        degree = degree_of_longest(pricer)
    else:
        degree = fixed_degree(pricer, "packed", parameter)
    drafts = (
        (f"packed degree {degree}", place_slots(pricer, slots))
        for slots in _candidates(pricer, degree)
    )
    name, placements = best_of(request, drafts)
    return Draft(placements=placements, algorithm=name)


def _candidates(pricer: Pricer, degree: int) -> Iterator[Slots]:
    lengths, cap = pricer.request.workload.lengths, pricer.capacity(degree)
    full = first_fit_decreasing(lengths, range(len(lengths)), cap)
    yield deal_by_tokens(pricer, degree, full)
    blocks = len(blocks_of(pricer.topology, degree))
    if len(full) % blocks:
        alone = [[i] for i, n in enumerate(lengths) if n > cap]
        rest = [i for i, n in enumerate(lengths) if n <= cap]
        count = -(-len(full) // blocks) * blocks - len(alone)
        even = balanced_packs(lengths, lengths, rest, count, cap)
        if even is not None:
            yield deal_by_tokens(pricer, degree, alone + even)
