"""`packed`: sequence packing on one fixed degree.

Source: sequence packing as in Krell et al., "Efficient Sequence Packing without
Cross-contamination" (2021), and the packed parallel of any-size video training: every pack holds as
many samples as memory allows, every pack runs on the same degree, and a loader balances tokens.

First-fit decreasing over the whole batch to the tokens that fit without recompute (a longer sample
alone, with the least recompute that fits), then the packs, largest first, each to the block with
the fewest tokens so far. Bare `packed` takes the smallest power of two on which the longest sample
fits without recompute, at most N.
"""

from __future__ import annotations

from megatron_dcp.planner.packing import (
    blocks_of,
    degree_of_longest,
    first_fit_decreasing,
    fixed_degree,
    lpt,
    stack_blocks,
)
from megatron_dcp.planner.pricing import Pricer, place_slots
from megatron_dcp.planner.registry import Draft, PlanRequest


def packed(request: PlanRequest, parameter: str | None) -> Draft:
    """`packed` or `packed:D`. Raises PlanError when the longest sample does not fit the degree."""
    pricer = Pricer(request)
    lengths, topology = request.workload.lengths, request.topology
    if parameter is None:
        degree = degree_of_longest(pricer)
    else:
        degree = fixed_degree(pricer, "packed", parameter)
    packs = first_fit_decreasing(lengths, range(len(lengths)), pricer.capacity(degree))
    tokens = [sum(lengths[i] for i in samples) for samples in packs]
    blocks = blocks_of(topology, degree)
    bins = lpt(tokens, [topology.block_speed(b, degree) for b in blocks])
    per_block = [(b, [packs[k] for k in held]) for b, held in zip(blocks, bins, strict=True)]
    return Draft(
        placements=place_slots(pricer, stack_blocks(pricer, degree, per_block)),
        algorithm=f"packed degree {degree}",
    )
