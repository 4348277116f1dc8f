"""`kk`: Karmarkar-Karp balancing over the data-parallel groups of one fixed degree.

Source: Karmarkar and Karp, "The Differencing Method of Set Partitioning" (1982), as RL trainers
such as verl use it to balance sequences over data-parallel ranks.

k-way largest differencing on the predicted time of each sample partitions the batch over the N/d
blocks; inside a block first-fit decreasing to the tokens that fit without recompute (`static`'s).
`kk:D` fixes the degree; bare `kk` takes the best one for the batch.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from megatron_dcp.planner.packing import (
    Slots,
    best_degree,
    blocks_of,
    deal,
    first_fit_decreasing,
    sample_weights,
    stack_blocks,
)
from megatron_dcp.planner.pricing import Pricer
from megatron_dcp.planner.registry import Draft, PlanRequest


def kk(request: PlanRequest, parameter: str | None) -> Draft:
    """`kk` or `kk:D`. Raises PlanError when the longest sample fits no degree."""
    return best_degree(request, "kk", parameter, _candidates)


def _candidates(pricer: Pricer, degree: int) -> Iterator[Slots]:
    lengths, topology = pricer.request.workload.lengths, pricer.topology
    cap, blocks = pricer.capacity(degree), blocks_of(topology, degree)
    parts = karmarkar_karp(sample_weights(pricer, degree), len(blocks))
    # The heaviest part goes to the fastest block.
    fastest = sorted(blocks, key=lambda b: (-topology.block_speed(b, degree), b))
    packs = [first_fit_decreasing(lengths, part, cap) for part in parts]
    yield stack_blocks(pricer, degree, list(zip(fastest, packs, strict=True)))
    if pricer.request.lockstep > 1:
        yield deal(pricer, degree, [p for part in packs for p in part])


def karmarkar_karp(weights: Sequence[int], parts: int) -> list[list[int]]:
    """Items of each of `parts` sets, heaviest set first.

    The two partial partitions of the largest spread (largest sum - smallest sum) are merged, the
    largest set of one with the smallest of the other, until one is left. A partial partition keeps
    only its non-empty sets, so early merges are short.
    """
    # (-spread, serial, [(sum, items)] by falling sum)
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = [
        (-w if parts > 1 else 0, i, [(w, [i])]) for i, w in enumerate(weights)
    ]
    heapq.heapify(heap)
    serial = len(weights)
    while len(heap) > 1:
        first = heapq.heappop(heap)[2]
        second = heapq.heappop(heap)[2]
        merged = _merge(first, second, parts)
        spread = merged[0][0] - (merged[-1][0] if len(merged) == parts else 0)
        heapq.heappush(heap, (-spread, serial, merged))
        serial += 1
    sets = [items for _, items in heap[0][2]] if heap else []
    return [sorted(s) for s in sets] + [[] for _ in range(parts - len(sets))]


def _merge(
    first: list[tuple[int, list[int]]], second: list[tuple[int, list[int]]], parts: int
) -> list[tuple[int, list[int]]]:
    free = parts - len(first)  # sets of `first` that are still empty take the largest of `second`
    out = first + second[:free]
    for k, (total, items) in enumerate(second[free:]):
        # The next largest of `second` joins the smallest non-empty set of `first`.
        target = len(first) - 1 - k
        out[target] = (first[target][0] + total, first[target][1] + items)
    out.sort(key=lambda s: (-s[0], s[1][0]))
    return out
