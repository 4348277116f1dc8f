"""`bucket`: bucket parallel, one bucket per group, one fixed degree.

Source: bucket parallel of any-size video training (Open-Sora's bucket sampler; the opponent of the
original DCP page): the sequence-parallel degree is fixed by the longest sample, samples of one
bucket are batched to fill memory, and every group of ranks runs batches of one bucket at a time.

Batches of one bucket (`planner.buckets`) up to the tokens that fit without recompute, or up to an
equal share of the batch where that needs no more rounds (the better of the two); a longer sample
alone with the least recompute that fits. Batches go, largest first, to the group with the fewest
tokens so far. `bucket:D` fixes the degree; bare `bucket` and `bucket:longest` take the smallest
power of two on which the longest sample fits without recompute, at most N.
"""

from __future__ import annotations

import math

from megatron_dcp.planner.buckets import batches_of, buckets_of
from megatron_dcp.planner.packing import (
    best_of,
    blocks_of,
    deal_by_tokens,
    degree_of_longest,
    fixed_degree,
)
from megatron_dcp.planner.pricing import Pricer, place_slots
from megatron_dcp.planner.registry import Draft, PlanRequest


def bucket(request: PlanRequest, parameter: str | None) -> Draft:
    """`bucket`, `bucket:longest` or `bucket:D`. Raises PlanError when a sample does not fit."""
    pricer = Pricer(request)
    lengths = request.workload.lengths
    if parameter is None or parameter == "longest":
        degree = degree_of_longest(pricer)
    else:
        degree = fixed_degree(pricer, "bucket", parameter)
    cap, groups = pricer.capacity(degree), len(blocks_of(request.topology, degree))
    rounds = max(1, math.ceil(request.workload.tokens / max(1, cap * groups)))
    share = math.ceil(request.workload.tokens / (rounds * groups))
    held = buckets_of(request.workload)
    drafts = []
    for tokens in (cap, min(cap, share)):
        batches = [batch for one in held for batch in batches_of(lengths, one, tokens)]
        slots = deal_by_tokens(pricer, degree, batches)
        drafts.append((f"bucket degree {degree}", place_slots(pricer, slots)))
    name, placements = best_of(request, drafts)
    return Draft(placements=placements, algorithm=name)
