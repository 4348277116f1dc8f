"""Degrees, blocks, LPT, first-fit decreasing, best degree: what fixed-degree strategies share.

Everything is deterministic: larger first, ties by id, and the lower block on equal loads.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from megatron_dcp.errors import ConfigError
from megatron_dcp.plan import Placement, Topology
from megatron_dcp.plan.types import NOMINAL_SPEED
from megatron_dcp.planner.pricing import Pricer, Share, place_slots, replayed_us
from megatron_dcp.planner.registry import Draft, PlanRequest

Slots = list[list[Share]]


def degree_ladder(topology: Topology) -> list[int]:
    """Powers of two that the topology allows, ascending, and what it has in their place.

    Where a node is not a power of two: 1, 2, 4 .. below M, then M, 2M, 4M ..; the last entry is
    always N, so that a sample which fits only on all ranks has a degree.
    """
    n, m = topology.data_ranks, topology.ranks_per_node
    ladder = set(_doubling(1, m)) | set(_doubling(m, n)) | {n}
    return sorted(ladder)


def _doubling(first: int, last: int) -> list[int]:
    out = []
    while first <= last:
        out.append(first)
        first *= 2
    return out


def blocks_of(topology: Topology, degree: int) -> list[int]:
    """First ranks of the disjoint blocks of one degree: inside nodes, or whole nodes.

    Where the degree does not divide a node (or the nodes) the ranks that remain stay idle.
    """
    n, m = topology.data_ranks, topology.ranks_per_node
    if degree > m:
        return list(range(0, n - degree + 1, degree))
    return [r for node in range(0, n, m) for r in range(node, node + m - degree + 1, degree)]


def parse_degree(topology: Topology, strategy: str, parameter: str) -> int:
    """The fixed degree after the colon; it must be one that the topology allows."""
    if not parameter.isascii() or not parameter.isdigit():
        raise ConfigError(f"strategy {strategy}:{parameter}: the degree must be an integer >= 1")
    degree = int(parameter)
    if not topology.legal_degree(degree):
        m, n = topology.ranks_per_node, topology.data_ranks
        raise ConfigError(
            f"strategy {strategy}:{parameter}: {n} data ranks with {m} per node have blocks of "
            f"1..{m} ranks or of whole nodes up to {n}; choose one of these"
        )
    return degree


def degree_of_longest(pricer: Pricer) -> int:
    """The smallest power of two on which the longest sample fits without recompute, at most N."""
    ladder = degree_ladder(pricer.topology)
    longest = pricer.longest()
    tokens = pricer.packs[longest].tokens
    for degree in ladder:
        if tokens <= pricer.capacity(degree):
            return degree
    if pricer.sample_price(longest, ladder[-1]) is None:
        raise pricer.cannot_fit(longest, ladder[-1:], f"on all {ladder[-1]} ranks")
    return ladder[-1]


def fixed_degree(pricer: Pricer, strategy: str, parameter: str) -> int:
    """The degree after the colon, checked against the topology and against the longest sample."""
    degree = parse_degree(pricer.topology, strategy, parameter)
    longest = pricer.longest()
    if pricer.sample_price(longest, degree) is None:
        raise pricer.cannot_fit(longest, [degree], f"on {degree} ranks ({strategy}:{degree})")
    return degree


def lpt(weights: Sequence[int], speeds: Sequence[int]) -> list[list[int]]:
    """Longest processing time first: items onto bins so that the largest finish is small.

    weights: one per item; speeds: one per bin, per mille. Returns the items of each bin, heaviest
    first. An item goes to the bin that would finish it first; ties to the lower bin.
    """
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    bins: list[list[int]] = [[] for _ in speeds]
    if all(s == speeds[0] for s in speeds):
        heap = [(0, b) for b in range(len(speeds))]
        for i in order:
            load, b = heap[0]
            heapq.heapreplace(heap, (load + weights[i], b))
            bins[b].append(i)
        return bins
    loads = [0] * len(speeds)
    for i in order:
        b = min(
            range(len(speeds)),
            key=lambda k, w=weights[i]: ((loads[k] + w) * NOMINAL_SPEED // speeds[k], k),  # type: ignore[misc]
        )
        loads[b] += weights[i]
        bins[b].append(i)
    return bins


class FirstFit:
    """Bins of one capacity; `add` puts an item into the first bin with room, in O(log bins)."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.bins: list[list[int]] = []
        self._size = 1
        self._room = [0, 0]  # a tournament tree of free room; leaves at self._size + bin

    def add(self, item: int, size: int) -> None:
        """An item larger than the capacity gets a bin of its own, which then is full."""
        if size > self.capacity or self._room[1] < size:
            self._open(max(0, self.capacity - size))
            self.bins[-1].append(item)
            return
        node = 1
        while node < self._size:
            node *= 2
            if self._room[node] < size:
                node += 1
        self.bins[node - self._size].append(item)
        self._set(node, self._room[node] - size)

    def _open(self, room: int) -> None:
        if len(self.bins) == self._size:
            leaves = self._room[self._size :]
            self._size *= 2
            self._room = [0] * (2 * self._size)
            for i, value in enumerate(leaves):
                self._set(self._size + i, value)
        self.bins.append([])
        self._set(self._size + len(self.bins) - 1, room)

    def _set(self, node: int, value: int) -> None:
        self._room[node] = value
        while node > 1:
            node //= 2
            self._room[node] = max(self._room[2 * node], self._room[2 * node + 1])


def first_fit_decreasing(
    lengths: Sequence[int], samples: Sequence[int], cap: int
) -> list[list[int]]:
    """Packs of at most `cap` tokens; a longer sample is a pack of its own."""
    fit = FirstFit(cap)
    for i in sorted(samples, key=lambda i: (-lengths[i], i)):
        fit.add(i, lengths[i])
    return fit.bins


def balanced_packs(
    lengths: Sequence[int], weights: Sequence[int], samples: Iterable[int], count: int, cap: int
) -> list[list[int]] | None:
    """At most `count` packs of at most `cap` tokens, near equal in weight; None: no room for one.

    Samples in falling length, each into the pack of least weight if it has room, else into the one
    with the fewest tokens.
    """
    weight = np.zeros(count, dtype=np.int64)
    tokens = np.zeros(count, dtype=np.int64)
    packs: list[list[int]] = [[] for _ in range(count)]
    for i in sorted(samples, key=lambda i: (-lengths[i], i)):
        k = int(np.argmin(weight))
        if tokens[k] + lengths[i] > cap:
            k = int(np.argmin(tokens))
            if tokens[k] + lengths[i] > cap:
                return None
        packs[k].append(i)
        weight[k] += weights[i]
        tokens[k] += lengths[i]
    return [p for p in packs if p]


def deal_by_tokens(pricer: Pricer, degree: int, packs: Sequence[Sequence[int]]) -> Slots:
    """Packs, most tokens first, each to the block with the fewest tokens so far."""
    lengths, topology = pricer.request.workload.lengths, pricer.topology
    blocks = blocks_of(topology, degree)
    tokens = [sum(lengths[i] for i in samples) for samples in packs]
    bins = lpt(tokens, [topology.block_speed(b, degree) for b in blocks])
    per_block = [(b, [packs[k] for k in held]) for b, held in zip(blocks, bins, strict=True)]
    return stack_blocks(pricer, degree, per_block)


def stack_blocks(
    pricer: Pricer, degree: int, per_block: Sequence[tuple[int, Sequence[Sequence[int]]]]
) -> Slots:
    """Slots from the packs of each block (first_rank, packs): the k-th longest pack in slot k.

    Longest first lines up long packs of different blocks, which is what lockstep slots want; async
    does not care about the order inside a block.
    """
    slots: Slots = []
    for first_rank, packs in per_block:
        order = sorted(packs, key=lambda p: (-pricer.share_time_us(p, degree), min(p)))
        for k, samples in enumerate(order):
            if k == len(slots):
                slots.append([])
            slots[k].append(Share(first_rank, degree, tuple(samples)))
    return slots


def deal(pricer: Pricer, degree: int, packs: Sequence[Sequence[int]]) -> Slots:
    """Packs, longest time first, dealt to the blocks slot by slot: equal slots for lockstep."""
    blocks = blocks_of(pricer.topology, degree)
    ordered = sorted(packs, key=lambda p: (-pricer.share_time_us(p, degree), min(p)))
    return [
        [
            Share(block, degree, tuple(samples))
            for block, samples in zip(blocks, ordered[k : k + len(blocks)], strict=False)
        ]
        for k in range(0, len(ordered), len(blocks))
    ]


def sample_weights(pricer: Pricer, degree: int) -> list[int]:
    """Predicted time of each sample alone on a degree, without the overhead, us.

    A pack pays the overhead once, so a sample's share of it is no weight of its own.
    """
    weights = []
    for i in range(len(pricer.packs)):
        price = pricer.sample_price(i, degree)
        if price is None:
            raise pricer.cannot_fit(i, [degree], f"on {degree} ranks")
        weights.append(price.time_us - pricer.overhead_us)
    return weights


def best_of(
    request: PlanRequest, drafts: Iterable[tuple[str, Sequence[Placement]]]
) -> tuple[str, Sequence[Placement]]:
    """The draft with the smallest makespan by replay; the first of equals."""
    best: tuple[int, str, Sequence[Placement]] | None = None
    for name, placements in drafts:
        span = replayed_us(request, placements)
        if best is None or span < best[0]:
            best = (span, name, placements)
    assert best is not None
    return best[1], best[2]


def best_degree(
    request: PlanRequest,
    strategy: str,
    parameter: str | None,
    candidates: Callable[[Pricer, int], Iterable[Slots]],
) -> Draft:
    """Every candidate of the degree after the colon, else of every degree of the ladder.

    Keeps the smallest makespan; ties go to the smaller degree. Raises PlanError when the longest
    sample fits none of them.
    """
    pricer = Pricer(request)
    longest = pricer.longest()
    if parameter is not None:
        degrees = [fixed_degree(pricer, strategy, parameter)]
    else:
        ladder = degree_ladder(request.topology)
        degrees = [d for d in ladder if pricer.sample_price(longest, d) is not None]
        if not degrees:
            raise pricer.cannot_fit(longest, ladder, f"on every degree of {strategy}")
    best: tuple[int, int, Sequence[Placement]] | None = None
    for degree in degrees:
        if best is not None and best[0] <= _at_least_us(pricer, longest, degree):
            continue
        for slots in candidates(pricer, degree):
            placements = place_slots(pricer, slots)
            span = replayed_us(request, placements)
            if best is None or span < best[0]:
                best = (span, degree, placements)
    assert best is not None
    return Draft(placements=best[2], algorithm=f"{strategy} degree {best[1]}")


def _at_least_us(pricer: Pricer, longest: int, degree: int) -> int:
    """No plan of one degree is faster: the pack of the longest sample takes at least its time."""
    speed = pricer.topology.speed
    price = pricer.sample_price(longest, degree)
    if price is None or (speed is not None and max(speed) > NOMINAL_SPEED):
        return 0
    return price.time_us
