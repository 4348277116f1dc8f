"""Oracle, part 2: the async search of csrc/planner/search.cc and improve.cc, step by step.

Wide samples first on nested windows, gaps filled with short samples, degree 1 by LPT, local search;
the portfolio keeps the layout that ends first. All times are integer microseconds.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from dataclasses import dataclass, field

from megatron_dcp.plan.types import NOMINAL_SPEED
from megatron_dcp.planner.oracle_table import LOCAL, Option, Table, rounded

EFFORT = 18000
SMALL_BATCH = 2048
MOST_NARROWED = 64
FINE_SHARE = 1000
PARTNERS = 24
FILL_GAP = 16
NEVER = 2**63 - 1


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


class Search:
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
            if s.tokens <= self.cap1 and self.time1[j] + self.open1 <= limit:
                small.append(j)
                continue
            o = self.table.cheapest(j, float(limit), c.free)
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
        for g in gaps:
            block = out.wide[g.block]
            d, first = block.degree, block.first
            if d > self.m or g.room <= 0:
                continue
            end, room = g.end, g.room
            if any(x != end for x in out.load[first : first + d]):
                continue
            if c.target - end > FILL_GAP * self.open1:
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

    # -- local search ---------------------------------------------------------------------------

    def singles_us(self, samples: list[int], rank: int) -> int:
        total, rooms = 0, list[int]()
        for j in samples:
            tokens = self.table.samples[j].tokens
            b = next((b for b, room in enumerate(rooms) if room >= tokens), -1)
            if b < 0:
                rooms.append(self.cap1)
                total += self.open1
            rooms[b] -= tokens
            total += self.time1[j]
        return self.scaled(total, rank, 1)

    def _exchange(self, mine: list[int], theirs: list[int], apart: int) -> tuple[int, int]:
        """(given, taken or -1): the difference nearest to half the distance; given -1: none."""
        half, best, give, take = apart // 2, apart, -1, -1
        for i in mine:
            off = abs(self.time1[i] - half)
            if off < best and off < half and len(mine) > 1:
                best, give, take = off, i, -1
            for j in theirs:
                if self.time1[j] >= self.time1[i]:
                    continue
                miss = abs(self.time1[i] - self.time1[j] - half)
                if miss < best and miss < half:
                    best, give, take = miss, i, j
        return give, take

    def improve(self, out: Layout) -> None:
        """Moves and swaps degree-1 samples between the slowest and the fastest ranks."""
        goal = out.mean + out.mean // 2000
        budget = (len(self.order) + self.n) // 4 + 64
        singles: list[list[int]] = [[] for _ in range(self.n)]
        for j in self.order:
            if out.rank_of[j] >= 0:
                singles[out.rank_of[j]].append(j)
        base = list(out.load)
        loads: list[tuple[int, int]] = []
        for r in range(self.n):
            if singles[r]:
                base[r] = out.base[r]
            out.load[r] = base[r] + self.singles_us(singles[r], r)
            if singles[r]:
                insort(loads, (out.load[r], r))
        place = {j: i for i, j in enumerate(self.order)}
        while budget > 0 and loads:
            budget -= 1
            slow, c = loads[-1]
            if slow <= goal or not self._step_down(out, loads, singles, base, place, slow, c):
                break
        out.end = max(out.load)

    def _step_down(
        self, out: Layout, loads: list[tuple[int, int]], singles: list[list[int]],
        base: list[int], place: dict[int, int], slow: int, c: int,
    ) -> bool:  # fmt: skip
        for fast, q in loads[:PARTNERS]:
            if q == c:
                return False
            give, take = self._exchange(singles[c], singles[q], slow - fast)
            if give < 0:
                continue
            added = [] if take < 0 else [take]
            mine = sorted([j for j in singles[c] if j != give] + added, key=place.__getitem__)
            theirs = sorted([j for j in singles[q] if j != take] + [give], key=place.__getitem__)
            a, b = base[c] + self.singles_us(mine, c), base[q] + self.singles_us(theirs, q)
            if max(a, b) >= slow:
                continue
            loads.remove((slow, c))
            loads.remove((fast, q))
            singles[c], singles[q] = mine, theirs
            out.rank_of[give] = q
            if take >= 0:
                out.rank_of[take] = c
            out.load[c], out.load[q] = a, b
            insort(loads, (a, c))
            insort(loads, (b, q))
            return True
        return False

    # -- portfolio ------------------------------------------------------------------------------

    def tune(
        self, c: Candidate, low: int, rounds: int, best: Layout, chosen: Candidate
    ) -> tuple[Layout, Candidate]:
        """The target at which a family just succeeds, in at most `rounds` layouts."""
        high = best.end
        for _ in range(rounds):
            trial = self.layout(c)
            if len(self.order) <= SMALL_BATCH:
                self.improve(trial)
            mean = max(low, trial.mean)
            if trial.end <= c.target + c.target // 2000:
                high = min(high, c.target)
            else:
                low = max(low, c.target)
            if trial.end < best.end:
                best, chosen = trial, c
            high = min(high, best.end)
            if high - mean <= mean // FINE_SHARE or high - low <= low // FINE_SHARE:
                break
            following = mean + mean // 400
            if following <= low or following >= high:
                following = low + (high - low) // 2
            c = Candidate(following, c.theta, c.free, c.fill)
        return best, chosen

    def blocks(self, area: int) -> tuple[list[Block], str]:
        """The blocks of the best layout and the name of its candidate."""
        best, chosen = Layout(end=NEVER), Candidate(0, 1000, False, False)
        goal = area + area // 100
        rounds = min(max(EFFORT // (len(self.order) + self.n), 3), 12)
        for theta in (1000, 500, 340):
            for fill in (True, False):
                more = theta < 1000 or not fill
                if more and (best.end <= goal or len(self.order) > SMALL_BATCH):
                    continue
                for free in (False, True):
                    if best.end <= area + area // 400:
                        break
                    c = Candidate(area + area // 500, theta, free, fill)
                    best, chosen = self.tune(c, area, rounds, best, chosen)
        self.improve(best)
        blocks, single = list(best.wide), dict[int, Block]()
        for j in self.order:
            r = best.rank_of[j]
            if r >= 0 and r not in single:
                single[r] = Block(r, 1)
                blocks.append(single[r])
            if r >= 0:
                single[r].samples.append(j)
        name = "free" if chosen.free else "powers"
        return blocks, f"{name}{'-fill' if chosen.fill else ''}-{chosen.theta}"

    def split(self, target: int, domain: int) -> tuple[list[int], list[Block]]:
        """Lockstep: samples that run inside one domain, and blocks of the others."""
        c = Candidate(target, 1000, False, False)
        inside: list[int] = []
        wide = []
        for x in self.choose(c, inside):
            if x.degree > domain:
                wide.append(x)
            else:
                inside.append(x.sample)
        inside.sort(key=lambda j: (-self.time1[j], j))
        out = Layout(load=[0] * self.n)
        self.place_wide(c, wide, out, [])
        return inside, out.wide
