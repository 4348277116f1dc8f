"""`wlb`: greedy packing on work with one static degree.

Source: WLB-LLM, "Workload-Balanced 4D Parallelism for Large Language Model Training" (2025), its
variable-length packing: documents in falling length, each into the microbatch with the least work
that has room, else into the one with the fewest tokens that has room; microbatches may differ in
tokens up to what memory allows, so that they are equal in work. The delay of outliers to later
steps is left out, because a plan never changes the global batch: where a document finds no room the
number of microbatches grows instead.

K microbatches per block (the least K that holds the batch, and the two after it), dealt to the
blocks by LPT on predicted time (lockstep: slot by slot). `wlb:D` fixes the degree; bare `wlb` takes
the best one for the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_dcp.planner.packing import (
    Slots,
    balanced_packs,
    best_degree,
    blocks_of,
    deal,
    lpt,
    sample_weights,
    stack_blocks,
)
from megatron_dcp.planner.pricing import Pricer
from megatron_dcp.planner.registry import Draft, PlanRequest

MORE_MICROBATCHES = 3


def wlb(request: PlanRequest, parameter: str | None) -> Draft:
    """`wlb` or `wlb:D`. Raises PlanError when the longest sample fits no degree."""
    return best_degree(request, "wlb", parameter, _candidates)


def _candidates(pricer: Pricer, degree: int) -> Iterator[Slots]:
    lengths, topology = pricer.request.workload.lengths, pricer.topology
    cap, blocks = pricer.capacity(degree), blocks_of(topology, degree)
    weights = sample_weights(pricer, degree)
    # A sample over the cap runs alone, with recompute; the rest is packed.
    alone = [[i] for i, n in enumerate(lengths) if n > cap]
    rest = [i for i, n in enumerate(lengths) if n <= cap]
    per_block = max(1, math.ceil(sum(lengths[i] for i in rest) / max(1, cap * len(blocks))))
    found = 0
    while found < MORE_MICROBATCHES:
        packs = balanced_packs(lengths, weights, rest, per_block * len(blocks), cap)
        per_block += 1
        if packs is None:
            continue
        found += 1
        packs = alone + packs
        if pricer.request.lockstep > 1:
            yield deal(pricer, degree, packs)
        times = [pricer.price(pricer.pack_of(p), degree) for p in packs]
        bins = lpt(
            [0 if t is None else t.time_us for t in times],
            [topology.block_speed(b, degree) for b in blocks],
        )
        yield stack_blocks(
            pricer,
            degree,
            [(b, [packs[k] for k in held]) for b, held in zip(blocks, bins, strict=True)],
        )
