"""Oracle, part 4: from blocks to priced placements, as csrc/planner/finish.cc does it."""

from __future__ import annotations

from dataclasses import replace

from megatron_dcp.cost import Pack
from megatron_dcp.plan import Placement
from megatron_dcp.plan.types import NOMINAL_SPEED
from megatron_dcp.planner.oracle_layout import Block
from megatron_dcp.planner.oracle_table import Table
from megatron_dcp.planner.pricing import replayed_us

CUTS = 64


def price(
    table: Table, first: int, degree: int, exact: int, samples: list[int]
) -> Placement | None:
    """One pack as a placement of slot 0, in its fastest mode; None when it does not fit."""
    pack = Pack()
    for j in samples:
        pack = pack + table.samples[j]
    time, mode, r = table.best_mode(pack, degree, exact)
    if time < 0:
        return None
    how = table.modes[degree][mode]
    speed = table.request.topology.block_speed(first, degree)
    if speed != NOMINAL_SPEED:
        time = table.cost.time_us(pack, degree, how, r, speed)
    return Placement(
        slot=0,
        first_rank=first,
        degree=degree,
        samples=tuple(samples),
        scheme=how.scheme,
        inner_degree=how.inner_degree,
        recompute=r,
        time_us=time,
        bytes=table.bytes(pack.tokens, degree, how, r),
    )


def _price_all(table: Table, block: Block, packs: list[list[int]]) -> list[Placement] | None:
    priced = [price(table, block.first, block.degree, -1, samples) for samples in packs]
    return None if None in priced else [p for p in priced if p is not None]


def _spread(table: Table, order: list[int], count: int) -> list[list[int]]:
    """Longest first, each into the pack with the fewest tokens."""
    packs: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count
    for j in order:
        k = tokens.index(min(tokens))
        tokens[k] += table.samples[j].tokens
        packs[k].append(j)
    return packs


def _first_fit(table: Table, order: list[int], cap: int) -> list[list[int]]:
    packs: list[list[int]] = []
    tokens: list[int] = []
    for j in order:
        t = table.samples[j].tokens
        k = next((k for k, used in enumerate(tokens) if used + t <= cap), len(packs))
        if k == len(packs):
            packs.append([])
            tokens.append(0)
        packs[k].append(j)
        tokens[k] += t
    return packs


def _total(placements: list[Placement]) -> int:
    return sum(p.time_us for p in placements)


def pack_block(table: Table, block: Block, want: int = 0) -> list[Placement]:
    """First-fit decreasing under the cap; fewer packs, with recompute, where that is faster.

    want: so many packs, as samples and memory allow.
    """
    order = sorted(block.samples, key=lambda j: (-table.samples[j].tokens, j))
    if want > 0:
        priced = _price_all(table, block, _spread(table, order, min(want, len(order))))
        if priced is not None:
            return priced
    cap = max(table.cap(block.degree, m, 0) for m in range(len(table.modes[block.degree])))
    best = _price_all(table, block, _first_fit(table, order, cap))
    assert best is not None, "a block holds a sample that does not fit its degree"
    while len(best) > 1 and table.request.recompute:
        other = _price_all(table, block, _spread(table, order, len(best) - 1))
        if other is None or _total(other) >= _total(best):
            break
        best = other
    return best


def close_plan(table: Table, placements: list[Placement]) -> tuple[list[Placement], int]:
    """ZeRO-3: one recompute value per slot, its largest. Then (sorted placements, makespan)."""
    request, n = table.request, table.ranks
    if request.lockstep == n and n > 1:
        most: dict[int, int] = {}
        for p in placements:
            most[p.slot] = max(most.get(p.slot, 0), p.recompute)
        for i, p in enumerate(placements):
            if p.recompute != most[p.slot]:
                samples = list(p.samples)
                q = price(table, p.first_rank, p.degree, most[p.slot], samples)
                assert q is not None, "more recompute never needs more memory"
                placements[i] = replace(q, slot=p.slot)
    ordered = sorted(placements, key=lambda p: p.order)
    return ordered, replayed_us(request, ordered)


def _assign_slots(table: Table, packed: list[list[Placement]]) -> tuple[list[Placement], list[int]]:
    """(placements, each in the first slot in which its ranks are free; slots used by each rank)."""
    following = [0] * table.ranks
    out = []
    for packs in packed:
        for p in packs:
            slot = max(following[p.first_rank : p.first_rank + p.degree])
            following[p.first_rank : p.first_rank + p.degree] = [slot + 1] * p.degree
            out.append(replace(p, slot=slot))
    return out, following


def _assemble(
    table: Table, blocks: list[Block], want: list[int]
) -> tuple[list[Placement], list[int]]:
    """(placements, packs of each block). want: packs of each block, 0: as few as is fast."""
    packed = [pack_block(table, block, k) for block, k in zip(blocks, want, strict=True)]
    placements, used = _assign_slots(table, packed)
    if table.stages > 1:
        count = table.request.topology.microbatches(max(used))
        for b, block in enumerate(blocks):
            missing = count - used[block.first]
            if block.degree == 1 and missing and len(block.samples) > len(packed[b]):
                packed[b] = pack_block(table, block, len(packed[b]) + missing)
        placements, _ = _assign_slots(table, packed)
    return placements, [len(packs) for packs in packed]


def finish(table: Table, blocks: list[Block]) -> tuple[list[Placement], int]:
    """(sorted placements, makespan). Pipeline stages: ranks run equally many microbatches, so packs
    of degree 1 are cut where a dummy would follow, and the blocks of the largest placements are cut
    into one pack more while that is faster."""
    placements, packs = _assemble(table, blocks, [0] * len(blocks))
    plan, makespan = close_plan(table, placements)
    if table.stages == 1:
        return plan, makespan
    block_of = {j: b for b, block in enumerate(blocks) for j in block.samples}
    for _ in range(CUTS):
        largest = max((p.time_us for p in plan), default=0)
        cut = {
            block_of[p.samples[0]]
            for p in plan
            if len(p.samples) > 1 and p.time_us >= largest - largest // 4
        }
        want = [count + (b in cut) for b, count in enumerate(packs)]
        placements, packs = _assemble(table, blocks, want)
        trial, ends = close_plan(table, placements)
        if ends >= makespan:
            break
        plan, makespan = trial, ends
    return plan, makespan
