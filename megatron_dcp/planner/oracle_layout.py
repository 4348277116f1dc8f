"""Oracle, part 2: one layout of the async search, as csrc/planner/layout.cc makes it.

Wide samples first on nested windows, gaps filled with short samples, degree 1 by LPT. All times are
integer microseconds.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from dataclasses import dataclass, field

from megatron_dcp.plan.types import NOMINAL_SPEED
from megatron_dcp.planner.oracle_table import LOCAL, Option, Table, rounded

KEEP = 0.999
MOST_NARROWED = 64
FILL_GAP, FILL_GAP_FEW, FILL_GAP_FAR = 16, 32, 2


@dataclass(slots=True)
class Block:
    """The samples that share one block; listed in the order in which ranks run them."""

    first: int
    degree: int
    samples: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Candidate:
    target: int
    theta: int
    free: bool
    fill: bool
    forced: dict[int, int] = field(default_factory=dict)  # sample -> its degree
    patient: bool = False


@dataclass(slots=True)
class Layout:
    wide: list[Block] = field(default_factory=list)
    base: list[int] = field(default_factory=list)
    load: list[int] = field(default_factory=list)
    rank_of: list[int] = field(default_factory=list)
    end: int = 0
    mean: int = 0


@dataclass(frozen=True, slots=True)
class Item:
    """time: us in an open pack; open: what opening adds; cap 0: the sample runs alone."""

    sample: int
    degree: int
    mode: int
    time: int
    open: int
    cap: int


@dataclass(slots=True)
class Gap:
    block: int
    mode: int
    end: int
    room: int


class Layouts:
    """What a candidate makes of one request."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.n = table.ranks
        self.m = table.per_node
        self.speed = table.request.topology.speed
        self.open1 = table.opening(1, LOCAL)
        self.cap1 = table.cap(1, 0, 0)
        self.time1 = [
            rounded(table.alone(s, 1, LOCAL, 0)[0] + table.overhead) - self.open1
            for s in table.samples
        ]
        self.order = sorted(range(len(self.time1)), key=lambda j: (-self.time1[j], j))

    def scaled(self, us: int, first: int, degree: int) -> int:
        if self.speed is None:
            return us
        s = min(self.speed[first : first + degree])
        return (us * NOMINAL_SPEED + s // 2) // s

    def item(self, sample: int, o: Option) -> Item:
        mode = self.table.modes[o.degree][o.mode]
        opening = self.table.opening(o.degree, mode)
        cap = 0 if o.recompute else self.table.cap(o.degree, o.mode, 0)
        time = rounded(o.alone + self.table.overhead) - opening
        return Item(sample, o.degree, o.mode, time, opening, cap)

    def choose(self, c: Candidate, small: list[int]) -> list[Item]:
        """Degree of every sample: the least work that ends within theta * target."""
        limit = c.target * c.theta // 1000
        wide: list[Item] = []
        for j in self.order:
            s = self.table.samples[j]
            if c.forced.get(j):
                o = self.table.on(j, c.forced[j])
                if o.degree > 1:
                    wide.append(self.item(j, o))
                    continue
            if s.tokens <= self.cap1 and self.time1[j] + self.open1 <= limit:
                small.append(j)
                continue
            o = self.table.cheapest(j, float(limit), c.free, KEEP)
            if o.degree == 0:
                o = self.table.fastest(j)
            wide.append(self.item(j, o))
        wide.sort(key=lambda x: (-x.degree, -x.time))
        return wide

    def _starts(self, d: int, step: int) -> list[int]:
        span = self.n if d > self.m else self.m
        return [
            f
            for node in range(0, self.n, span)
            for f in range(node, node + span - d + 1, step)
        ]  # fmt: skip

    def _step(self, free: bool, d: int) -> int:
        return (self.m if d > self.m else 1) if free else d

    def windows(self, free: bool, d: int, load: list[int]) -> list[tuple[int, int]]:
        """(latest finish, first rank): aligned windows, or those where the load changes."""
        step, span = self._step(free, d), self.n if d > self.m else self.m
        return sorted(
            (max(load[f : f + d]), f)
            for f in self._starts(d, step)
            if step == d or f % span == 0 or load[f] != load[f - 1]
        )

    def narrow(self, c: Candidate, load: list[int], end: int, x: Item) -> tuple[Item, int] | None:
        """Where an item would end before `end` on a smaller degree."""
        found = None
        for d in self.table.degrees:
            if d >= x.degree:
                break
            if not self.table.in_family(d, c.free):
                continue
            o = self.table.on(x.sample, d)
            if o.degree == 0:
                continue
            y = self.item(x.sample, o)
            for f in self._starts(d, self._step(c.free, d)):
                t = max(load[f : f + d]) + self.scaled(y.time + y.open, f, d)
                if t < end:
                    end, found = t, (y, f)
        return found

    def place_wide(self, c: Candidate, items: list[Item], out: Layout, gaps: list[Gap]) -> None:
        """Widest first, onto the fullest window that still ends within the target."""
        load = out.load
        later: list[tuple[int, int]] = []
        ready: list[tuple[int, int]] = []
        room = [-1] * self.n
        block_of = [-1] * self.n
        degree, narrowed = 0, 0
        for x in items:
            d, tokens = x.degree, self.table.samples[x.sample].tokens
            if d != degree:
                degree = d
                later, ready = self.windows(c.free, d, load), []
                room = [-1] * self.n
                block_of = [-1] * self.n
            limit = c.target - x.time - x.open
            while True:
                while later and later[0][0] <= limit:
                    ready.append(heapq.heappop(later))
                key, f = ready.pop() if ready else heapq.heappop(later)
                start = max(load[f : f + d])
                now = start - x.open if room[f] >= tokens else start
                if now <= key:
                    break
                heapq.heappush(later, (now, f))
            joins = room[f] >= tokens
            end = start + self.scaled(x.time if joins else x.time + x.open, f, d)
            if end > c.target and narrowed < MOST_NARROWED:
                other = self.narrow(c, load, end, x)
                if other is not None:
                    y, g = other
                    narrowed += 1
                    stop = max(load[g : g + y.degree])
                    stop += self.scaled(y.time + y.open, g, y.degree)
                    load[g : g + y.degree] = [stop] * y.degree
                    gaps.append(Gap(len(out.wide), y.mode, stop, y.cap - tokens))
                    out.wide.append(Block(g, y.degree, [x.sample]))
                    heapq.heappush(later, (start, f))
                    continue
            load[f : f + d] = [end] * d
            room[f] = max(room[f] - tokens, x.cap - tokens)
            if block_of[f] < 0:
                block_of[f] = len(out.wide)
                out.wide.append(Block(f, d))
                gaps.append(Gap(block_of[f], x.mode, 0, -1))
            out.wide[block_of[f]].samples.append(x.sample)
            gaps[block_of[f]].end = end
            gaps[block_of[f]].room = room[f]
            heapq.heappush(later, (end - x.open if room[f] >= tokens else end, f))
            after, stop = f + d, self.n if d > self.m else f // self.m * self.m + self.m
            if c.free and after + d <= stop and block_of[after] < 0:
                heapq.heappush(later, (max(load[after : after + d]), after))

    def fill_gaps(self, c: Candidate, gaps: list[Gap], small: list[int], out: Layout) -> list[int]:
        """Short samples join the last pack of a wide window; returns those that are left."""
        falling = [-self.time1[j] for j in small]
        used = [False] * len(small)
        widest = FILL_GAP_FEW if len(self.order) <= 2 * self.n else FILL_GAP
        for g in gaps:
            block = out.wide[g.block]
            d, first = block.degree, block.first
            if g.room <= 0:
                continue
            end, room = g.end, g.room
            if any(x != end for x in out.load[first : first + d]):
                continue
            if c.target - end > (FILL_GAP_FAR if d > self.m else widest) * self.open1:
                continue
            mode = self.table.modes[d][g.mode]
            empty = self.table.opening(d, mode)
            while c.target > end:
                taken = -1
                i = bisect_left(falling, -(c.target - end) * d)
                while i < len(small):
                    s = self.table.samples[small[i]]
                    if used[i] or s.tokens > room:
                        i += 1
                        continue
                    t = rounded(self.table.alone(s, d, mode, 0)[0] + self.table.overhead) - empty
                    t = self.scaled(t, first, d)
                    if end + t <= c.target:
                        taken = i
                        break
                    # Too long: look on where samples are shorter by as much.
                    share = float(c.target - end) / float(t)
                    most = int(share * float(self.time1[small[i]]))
                    i = max(i + 1, bisect_left(falling, -most))
                if taken < 0:
                    break
                end += t
                room -= s.tokens
                block.samples.append(small[taken])
                used[taken] = True
            out.load[first : first + d] = [end] * d
        return [j for i, j in enumerate(small) if not used[i]]

    def place_small(self, small: list[int], out: Layout) -> None:
        """Longest processing time first; a rank's packs are filled first-fit."""
        rooms: list[list[int]] = [[] for _ in range(self.n)]
        heap = sorted((out.load[r] + self.scaled(self.open1, r, 1), r) for r in range(self.n))
        for j in small:
            load, r = heap[0]
            tokens = self.table.samples[j].tokens
            load += self.scaled(self.time1[j], r, 1)
            b = next((b for b, room in enumerate(rooms[r]) if room >= tokens), -1)
            if b < 0:
                if rooms[r]:
                    load += self.scaled(self.open1, r, 1)
                rooms[r].append(self.cap1)
            rooms[r][b] -= tokens
            out.rank_of[j] = r
            out.load[r] = load
            heapq.heapreplace(heap, (load, r))

    def layout(self, c: Candidate) -> Layout:
        out = Layout(load=[0] * self.n, rank_of=[-1] * len(self.order))
        small: list[int] = []
        gaps: list[Gap] = []
        wide = self.choose(c, small)
        self.place_wide(c, wide, out, gaps)
        if c.fill:
            small = self.fill_gaps(c, gaps, small, out)
        out.base = list(out.load)
        self.place_small(small, out)
        out.end = max(out.load)
        out.mean = sum(out.load) // self.n
        return out
