"""`megatron`: the greedy of Megatron-Core's dynamic (hybrid) context parallelism.

Source: Megatron-Core's balanced CP scheduler, written from its description: work of a sample is
L^2/degree, the degree the least power of two with L/degree <= a cap of tokens per rank.

Samples, longest first, go into the current wave: each onto the aligned block of its degree with
the least sum of L^2/degree whose ranks stay under the cap; a sample that finds no room waits for
the next wave. Two readings of "block" are planned and the faster plan is kept: *groups* (a rank
belongs to one group of the wave; ranks that the wave leaves idle are filled by doubling the
smallest groups, and a single group that cannot double takes all ranks) and *nested* (smaller blocks
may lie on the ranks of larger ones as long as the ranks stay under the cap). The groups of a wave
stand on the blocks that are free first. Waves follow each other without a barrier (async), slot by
slot in lockstep.

`megatron:CAP` sets the cap; without it, it is what one rank holds without recompute.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megatron_dcp.errors import ConfigError
from megatron_dcp.planner.packing import best_of, blocks_of, degree_ladder
from megatron_dcp.planner.pricing import Pricer, Share, place_slots
from megatron_dcp.planner.registry import Draft, PlanRequest
from megatron_dcp.planner.waves import Group, WaveLayout, fits_topology, number_slots


def megatron(request: PlanRequest, parameter: str | None) -> Draft:
    """`megatron` or `megatron:CAP`. Raises PlanError when a sample fits no number of ranks."""
    pricer = Pricer(request)
    cap = _parse_cap(parameter) if parameter is not None else max(1, pricer.capacity(1))
    ladder = degree_ladder(request.topology)
    degrees = sample_degrees(pricer, cap)
    layout = WaveLayout(pricer)
    for wave in grouped_waves(pricer, degrees, cap):
        layout.add(fill_idle_ranks(pricer, wave, ladder))
    nested = number_slots(nested_waves(pricer, degrees, cap), request.topology.data_ranks)
    name, placements = best_of(
        request,
        [
            ("megatron groups", place_slots(pricer, layout.slots)),
            ("megatron nested", place_slots(pricer, nested)),
        ],
    )
    return Draft(placements=placements, algorithm=name)


def _parse_cap(parameter: str) -> int:
    if not parameter.isascii() or not parameter.isdigit() or int(parameter) < 1:
        raise ConfigError(
            f"strategy megatron:{parameter}: the cap is a number of tokens per rank, >= 1"
        )
    return int(parameter)


def sample_degrees(pricer: Pricer, cap: int) -> list[int]:
    """Least degree of the ladder with L/degree <= cap on which the sample fits at all, else N."""
    ladder = degree_ladder(pricer.topology)
    known: dict[int, int] = {}
    for i, length in enumerate(pricer.request.workload.lengths):
        if length not in known:
            usable = [d for d in ladder if pricer.sample_price(i, d) is not None]
            if not usable:
                raise pricer.cannot_fit(i, ladder, "on every degree of megatron")
            known[length] = next((d for d in usable if length <= cap * d), usable[-1])
    return [known[length] for length in pricer.request.workload.lengths]


@dataclass(slots=True)
class _Block:
    """Blocks of one degree in one wave: arrays over blocks_of(topology, degree)."""

    first: NDArray[np.int64]
    squares: NDArray[np.int64]  # sum of L^2 of the group that stands there
    tokens: NDArray[np.int64]
    samples: list[list[int]] = field(default_factory=list)


def _token_limit(pricer: Pricer, degree: int, cap: int) -> int:
    """Tokens of one group: the cap of its ranks, and what fits at all."""
    return min(cap * degree, pricer.capacity(degree, pricer.max_recompute))


def grouped_waves(pricer: Pricer, degrees: list[int], cap: int) -> list[list[Group]]:
    """Waves of disjoint groups, in the order in which the groups were opened."""
    lengths, topology = pricer.request.workload.lengths, pricer.topology
    waiting = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    waves = []
    while waiting:
        busy = np.zeros(topology.data_ranks, dtype=bool)
        state: dict[int, _Block] = {}
        opened: list[tuple[int, int]] = []
        left = []
        for i in waiting:
            d = degrees[i]
            block = state.get(d)
            if block is None:
                first = np.array(blocks_of(topology, d), dtype=np.int64)
                zeros = np.zeros(len(first), dtype=np.int64)
                block = _Block(first, zeros, zeros.copy(), [[] for _ in first])
                state[d] = block
            index = block.first[:, None] + np.arange(d)
            own = block.tokens > 0
            room = block.tokens + lengths[i] <= _token_limit(pricer, d, cap)
            usable = np.where(own, room, ~busy[index].any(axis=1))
            if not usable.any():
                left.append(i)
                continue
            k = int(np.argmin(np.where(usable, block.squares, np.iinfo(np.int64).max)))
            if not own[k]:
                busy[index[k]] = True
                opened.append((d, k))
            block.squares[k] += lengths[i] ** 2
            block.tokens[k] += lengths[i]
            block.samples[k].append(i)
        waves.append([Group(d, tuple(state[d].samples[k])) for d, k in opened])
        waiting = left
    return waves


def fill_idle_ranks(pricer: Pricer, wave: list[Group], ladder: list[int]) -> list[Group]:
    """Double the smallest group, heaviest first among equals, while idle ranks allow it."""
    lengths = pricer.request.workload.lengths
    groups = list(wave)
    heap = [(g.degree, -sum(lengths[i] ** 2 for i in g.samples), k) for k, g in enumerate(groups)]
    heapq.heapify(heap)
    used = sum(g.degree for g in groups)
    while used < pricer.topology.data_ranks:
        degree, work, k = heap[0]
        wider = ladder[ladder.index(degree) + 1]
        degrees = [d for d, _, _ in heap[1:]] + [wider]
        pack = pricer.pack_of(groups[k].samples)
        if not fits_topology(pricer.topology, degrees) or pricer.price(pack, wider) is None:
            break
        groups[k] = Group(wider, groups[k].samples)
        heapq.heapreplace(heap, (wider, work, k))
        used += wider - degree
    return groups


def nested_waves(pricer: Pricer, degrees: list[int], cap: int) -> list[list[Share]]:
    """Waves of shares that may nest: per wave, wide first."""
    lengths, topology = pricer.request.workload.lengths, pricer.topology
    n = topology.data_ranks
    index = {
        d: np.array(blocks_of(topology, d), dtype=np.int64)[:, None] + np.arange(d)
        for d in set(degrees)
    }
    waiting = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    waves = []
    while waiting:
        load, tokens = np.zeros(n), np.zeros(n)
        held: dict[tuple[int, int], list[int]] = {}
        held_tokens: dict[tuple[int, int], int] = {}
        left = []
        for i in waiting:
            d = degrees[i]
            used = tokens[index[d]].max(axis=1)
            usable = (used == 0) | (used + lengths[i] / d <= cap)
            k = int(np.argmin(np.where(usable, load[index[d]].max(axis=1), np.inf)))
            key = (d, int(index[d][k, 0]))
            limit = pricer.capacity(d, pricer.max_recompute)
            if not usable[k] or (key in held and held_tokens[key] + lengths[i] > limit):
                left.append(i)
                continue
            load[index[d][k]] += lengths[i] ** 2 / d
            tokens[index[d][k]] += lengths[i] / d
            held.setdefault(key, []).append(i)
            held_tokens[key] = held_tokens.get(key, 0) + lengths[i]
        order = sorted(held, key=lambda key: (-key[0], key[1]))
        waves.append([Share(first, d, tuple(held[d, first])) for d, first in order])
        waiting = left
    return waves
