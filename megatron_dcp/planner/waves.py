"""From groups without a place to slots: layout of waves, numbering of overlapping shares.

A wave (or round) is a set of groups that run side by side, one placement each. `WaveLayout` puts
each group of a wave on an aligned block, wide first, on the block that is free first; in async mode
ranks do not wait between waves, so that early finishers start the next wave early.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest

from megatron_dcp.plan import Topology
from megatron_dcp.planner.packing import Slots, blocks_of
from megatron_dcp.planner.pricing import Pricer, Share


@dataclass(frozen=True, slots=True)
class Group:
    """Samples that run together on `degree` ranks, wherever those are.

    least_recompute: at least this many layers are recomputed.
    """

    degree: int
    samples: tuple[int, ...]
    least_recompute: int = 0


def fits_topology(topology: Topology, degrees: Iterable[int]) -> bool:
    """Whether disjoint aligned blocks of these degrees exist, wide first."""
    wanted = sorted(degrees, reverse=True)
    if sum(wanted) > topology.data_ranks:
        return False
    if all(d & (d - 1) == 0 for d in (*wanted, topology.ranks_per_node)):
        return True  # powers of two, wide first: each offset is a multiple of the next degree
    busy = [False] * topology.data_ranks
    for degree in wanted:
        for first in blocks_of(topology, degree):
            if not any(busy[first : first + degree]):
                busy[first : first + degree] = [True] * degree
                break
        else:
            return False
    return True


class WaveLayout:
    """Slots built wave by wave, and when each rank is free after them (us)."""

    def __init__(self, pricer: Pricer) -> None:
        self.pricer = pricer
        self.slots: Slots = []
        self.free = [0] * pricer.topology.data_ranks

    def add(self, groups: Sequence[Group]) -> None:
        """One more wave. A group for which no aligned block is left goes into a wave of its own."""
        left: list[Group] = []
        shares: list[Share] = []
        busy = [False] * len(self.free)
        ordered = sorted(groups, key=self._order)
        for degree, same in groupby(ordered, key=lambda group: group.degree):
            for group, first in zip_longest(same, self._open_blocks(degree, busy)):
                if group is None:
                    break
                if first is None:
                    left.append(group)
                    continue
                block = slice(first, first + degree)
                end = max(self.free[block]) + self.time_us(group)
                busy[block], self.free[block] = [True] * degree, [end] * degree
                shares.append(Share(first, degree, group.samples, group.least_recompute))
        self.slots.append(shares)
        if self.pricer.request.lockstep > 1:
            self._wait_in_domains()
        if left:
            self.add(left)

    def _open_blocks(self, degree: int, busy: list[bool]) -> list[int]:
        """First ranks of the blocks that this wave has left, the one that is free first leading."""
        blocks = [
            b for b in blocks_of(self.pricer.topology, degree) if not any(busy[b : b + degree])
        ]
        return sorted(blocks, key=lambda b: (max(self.free[b : b + degree]), b))

    def _wait_in_domains(self) -> None:
        domain = self.pricer.request.lockstep
        for first in range(0, len(self.free), domain):
            latest = max(self.free[first : first + domain])
            self.free[first : first + domain] = [latest] * domain

    def _order(self, group: Group) -> tuple[int, int, int]:
        return (-group.degree, -self.time_us(group), min(group.samples))

    def time_us(self, group: Group) -> int:
        """Predicted time of a group on ranks of nominal speed."""
        return self.pricer.share_time_us(group.samples, group.degree, group.least_recompute)


def number_slots(waves: Iterable[Sequence[Share]], ranks: int) -> Slots:
    """Slots of shares that may overlap, in the given order: each as early as its ranks allow.

    Waves do not overlap: a wave starts in the slot after the last of the wave before it.
    """
    slots: Slots = []
    for wave in waves:
        base = len(slots)
        depth = [base] * ranks
        for share in wave:
            block = slice(share.first_rank, share.first_rank + share.degree)
            slot = max(depth[block])
            if slot == len(slots):
                slots.append([])
            slots[slot].append(share)
            depth[block] = [slot + 1] * share.degree
    return slots


def list_schedule(pricer: Pricer, groups: Sequence[Group]) -> Slots:
    """Wide groups first, then longest first, each on the block of its degree that is free first."""
    n = pricer.topology.data_ranks
    free = [0] * n
    timed = sorted((-g.degree, -_time(pricer, g), min(g.samples), g) for g in groups)
    shares: list[Share] = []
    for degree, same in groupby(timed, key=lambda item: -item[0]):
        heap = [(max(free[b : b + degree]), b) for b in blocks_of(pricer.topology, degree)]
        heapq.heapify(heap)
        for _, negative_us, _, group in same:
            begin, first = heap[0]
            heapq.heapreplace(heap, (begin - negative_us, first))
            shares.append(Share(first, degree, group.samples, group.least_recompute))
        for end, first in heap:
            free[first : first + degree] = [end] * degree
    return number_slots([shares], n)


def fill_slots(pricer: Pricer, groups: Sequence[Group]) -> Slots:
    """Slots of groups with like times: longest first, each into the first slot that has a block."""
    n = pricer.topology.data_ranks
    slots: Slots = []
    busy: list[list[bool]] = []
    used: list[int] = []
    for group in sorted(groups, key=lambda g: (-_time(pricer, g), min(g.samples))):
        blocks = blocks_of(pricer.topology, group.degree)
        for k in range(len(slots) + 1):
            if k == len(slots):
                slots.append([])
                busy.append([False] * n)
                used.append(0)
            if used[k] + group.degree > n:
                continue
            block = next((b for b in blocks if not any(busy[k][b : b + group.degree])), None)
            if block is not None:
                slots[k].append(Share(block, group.degree, group.samples, group.least_recompute))
                busy[k][block : block + group.degree] = [True] * group.degree
                used[k] += group.degree
                break
    return slots


def _time(pricer: Pricer, group: Group) -> int:
    return pricer.share_time_us(group.samples, group.degree, group.least_recompute)
