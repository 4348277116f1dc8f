"""Oracle, part 5: lockstep domains as csrc/planner/shelves.cc plans them."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from dataclasses import dataclass, field, replace

from megatron_dcp.plan import Placement
from megatron_dcp.planner.oracle_finish import close_plan, finish, price
from megatron_dcp.planner.oracle_layout import Block
from megatron_dcp.planner.oracle_search import NEVER, Search
from megatron_dcp.planner.oracle_table import EMPTY, Table, rounded

MAX_SHELVES = 4096
SET_ASIDE = 8
LEVELS = 8


@dataclass(slots=True)
class Shelf:
    recompute: int
    blocks: list[Block] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    height: int = 0
    area: float = 0.0


@dataclass(frozen=True, slots=True)
class Fit:
    degree: int = 0
    mode: int = 0
    time: int = 0
    open: int = 0
    cap: int = 0


@dataclass(slots=True)
class Open:
    first: int
    degree: int
    mode: int
    end: int
    room: int
    samples: list[int]


class Shelves:
    """Shelves on ranks first .. first + ranks - 1."""

    def __init__(self, table: Table, first: int, ranks: int) -> None:
        self.table, self.ranks = table, ranks
        m = table.per_node
        self.pieces: list[tuple[int, int]] = []  # (first rank, size), none straddles two nodes
        f = first
        while f < first + ranks:
            size = min(first + ranks, (f // m + 1) * m) - f
            self.pieces.append((f, size))
            f += size
        widest = max(size for _, size in self.pieces)
        self.degrees = [
            d for d in table.degrees if (d <= widest and d <= m) or (d > m and d <= ranks)
        ]
        steps = LEVELS if table.request.recompute else 0
        self.levels = sorted({table.layers * k // LEVELS for k in range(steps + 1)})

    def fit(self, sample: int, height: int, r: int) -> Fit:
        """Degree of least work that ends inside the height with exactly this recompute."""
        table, s = self.table, self.table.samples[sample]
        f = table.request.profile.recompute_fraction
        again = 1.0 + min(f.linear, f.attention) * (r / table.layers)
        floor = table.area[sample] * again * (1.0 - 1e-9)
        best, least = Fit(), 0.0
        for d in self.degrees:
            if floor > float(height) * d:
                continue
            if best.degree and floor + float(s.tokens) * table.wire_from[d] >= least:
                break
            for m, mode in enumerate(table.modes[d]):
                cap = table.cap(d, m, r)
                if s.tokens > cap:
                    continue
                alone = table.alone(s, d, mode, r)[0]
                total = rounded(alone + table.overhead)
                if total > height or (best.degree and alone * d >= least):
                    continue
                opening = table.opening(d, mode, r)
                best, least = Fit(d, m, total - opening, opening, cap), alone * d
            if best.degree and d == 1:
                break
        return best

    def allocate(self, d: int, used: list[int]) -> int:
        m = self.table.per_node
        if d <= m:
            rooms = [(size - used[k], k) for k, (_, size) in enumerate(self.pieces)]
            fitting = [x for x in rooms if x[0] >= d]
            if not fitting:
                return -1
            k = min(fitting)[1]
            used[k] += d
            return self.pieces[k][0] + used[k] - d
        nodes, run = d // m, 0
        for k, (_, size) in enumerate(self.pieces):
            run = run + 1 if used[k] == 0 and size == m else 0
            if run < nodes:
                continue
            used[k + 1 - nodes : k + 1] = [m] * nodes
            return self.pieces[k + 1 - nodes][0]
        return -1

    def place_wide(
        self, wide: list[tuple[int, Fit]], height: int, used: list[int], opened: list[Open],
        left: list[int],
    ) -> None:  # fmt: skip
        for j, f in wide:
            tokens = self.table.samples[j].tokens
            best: Open | None = None
            for o in opened:
                fits = o.degree == f.degree and o.end + f.time <= height and o.room >= tokens
                if fits and (best is None or o.end > best.end):
                    best = o
            if best is not None:
                best.end += f.time
                best.room -= tokens
                best.samples.append(j)
                continue
            first = self.allocate(f.degree, used)
            if first < 0:
                left.append(j)
            else:
                opened.append(Open(first, f.degree, f.mode, f.open + f.time, f.cap - tokens, [j]))

    def fill_gaps(
        self, height: int, r: int, small: list[tuple[int, int]], opened: list[Open]
    ) -> list[tuple[int, int]]:
        table = self.table
        falling = [-t for _, t in small]
        used = [False] * len(small)
        for o in opened:
            if o.degree > table.per_node:
                continue
            mode = table.modes[o.degree][o.mode]
            empty = rounded(table.alone(EMPTY, o.degree, mode, r)[0] + table.overhead)
            while o.end < height:
                taken = -1
                for i in range(bisect_left(falling, -(height - o.end) * o.degree), len(small)):
                    s = table.samples[small[i][0]]
                    if used[i] or s.tokens > o.room:
                        continue
                    t = rounded(table.alone(s, o.degree, mode, r)[0] + table.overhead) - empty
                    if o.end + t <= height:
                        taken = i
                        break
                if taken < 0:
                    break
                o.end += t
                o.room -= s.tokens
                o.samples.append(small[taken][0])
                used[taken] = True
        return [x for i, x in enumerate(small) if not used[i]]

    def place_small(
        self, small: list[tuple[int, int]], one: Fit, height: int, used: list[int],
        opened: list[Open], left: list[int],
    ) -> None:  # fmt: skip
        heap: list[tuple[int, int]] = []
        for k, (first, size) in enumerate(self.pieces):
            for f in range(first + used[k], first + size):
                heap.append((one.open, len(opened)))
                opened.append(Open(f, 1, one.mode, one.open, one.cap, []))
        heapq.heapify(heap)
        for j, time in small:
            tokens = self.table.samples[j].tokens
            placed, aside = False, list[tuple[int, int]]()
            while not placed and heap and len(aside) < SET_ASIDE:
                end, k = heap[0]
                if end + time > height:
                    break
                heapq.heappop(heap)
                o = opened[k]
                if o.room < tokens:
                    aside.append((end, k))
                    continue
                o.room -= tokens
                o.end = end + time
                o.samples.append(j)
                heapq.heappush(heap, (o.end, k))
                placed = True
            for entry in aside:
                heapq.heappush(heap, entry)
            if not placed:
                left.append(j)

    def fill(self, samples: list[int], height: int, r: int) -> Shelf:
        shelf = Shelf(r)
        wide: list[tuple[int, Fit]] = []
        small: list[tuple[int, int]] = []
        one = Fit()
        for j in samples:
            f = self.fit(j, height, r)
            if f.degree == 0:
                shelf.left.append(j)
            elif f.degree > 1:
                wide.append((j, f))
            else:
                one = f
                small.append((j, f.time))
        wide.sort(key=lambda x: -x[1].degree)
        used, opened = [0] * len(self.pieces), list[Open]()
        self.place_wide(wide, height, used, opened, shelf.left)
        small = self.fill_gaps(height, r, small, opened)
        self.place_small(small, one, height, used, opened, shelf.left)
        for o in opened:
            if not o.samples:
                continue
            shelf.height = max(shelf.height, o.end)
            for j in o.samples:
                shelf.area += self.table.area[j]
            shelf.blocks.append(Block(o.first, o.degree, o.samples))
        shelf.left.sort(key=lambda j: (-self.table.area[j], j))
        return shelf

    def close(self, samples: list[int], ceiling: int) -> Shelf | None:
        """One shelf for everything, as low as bisection finds, below the ceiling."""
        table = self.table
        total, longest, tokens = 0.0, 0, 0
        for j in samples:
            s = table.samples[j]
            tokens += s.tokens
            total += table.area[j]
            times = [table.best_mode(s, d, -1)[0] for d in self.degrees]
            longest = max(longest, min((t for t in times if t >= 0), default=-1))
        f = table.request.profile.recompute_fraction
        found: Shelf | None = None
        misses = 0
        for r in self.levels:
            if tokens > table.cap(1, 0, r) * self.ranks:
                continue
            if misses >= 2:
                break
            again = 1.0 + min(f.linear, f.attention) * (float(r) / table.layers)
            start = max(longest, int(total * again / self.ranks + table.overhead))
            best = self._bisect(samples, start, ceiling, r)
            if best is not None and best.height < ceiling:
                ceiling, found, misses = best.height, best, 0
            elif found is not None:
                misses += 1
        return found

    def _bisect(self, samples: list[int], start: int, ceiling: int, r: int) -> Shelf | None:
        low, high, step = start - 1, start, max(1, start // 64)
        best: Shelf | None = None
        while high < ceiling and high <= 64 * start:
            s = self.fill(samples, high, r)
            if not s.left:
                best = s
                break
            low = high
            high += step
            step *= 2
        while best is not None and high - low > max(1, high // 512):
            middle = low + (high - low) // 2
            s = self.fill(samples, middle, r)
            if not s.left:
                best, high = s, middle
            else:
                low = middle
        return best

    def best_shelf(self, samples: list[int]) -> Shelf | None:
        """The shelf of most area per height, among heights that the longest sample suggests."""
        table = self.table
        most, total = samples[0], 0.0
        for j in samples:
            total += table.area[j]
            if table.area[j] > table.area[most]:
                most = j
        longest = table.samples[most]
        powers = [d for d in self.degrees if d & (d - 1) == 0]
        heights = [table.best_mode(longest, d, -1)[0] for d in powers]
        lowest = min((h for h in heights if h >= 0), default=-1)
        best, found = -1.0, None
        for d in powers:
            for r in (self.levels[0], self.levels[len(self.levels) // 2], self.levels[-1]):
                height = table.best_mode(longest, d, r)[0]
                if height < 0 or height > 12 * lowest:
                    continue
                most_area = min(total, (float(height) - table.overhead) * self.ranks)
                if most_area <= best * float(height):
                    continue
                s = self.fill(samples, height, r)
                if s.height == 0:
                    continue
                rate = s.area / float(s.height)
                if rate > best:
                    best, found = rate, s
        return found

    def run(self, samples: list[int], slot: int) -> list[Placement] | None:
        """Placements from `slot` on; None when some sample does not fit here."""
        shelves: list[Shelf] = []
        best: list[Shelf] = []
        total, best_total = 0, NEVER
        for _ in range(MAX_SHELVES):
            if not samples or total >= best_total:
                break
            last = self.close(samples, best_total - total)
            if last is not None:
                best_total, best = total + last.height, [*shelves, last]
            rest = 2.0 * self.table.overhead
            for j in samples:
                rest += self.table.area[j] / self.ranks
            if float(total) + rest >= float(best_total):
                break
            following = self.best_shelf(samples)
            if following is None:
                break
            total += following.height
            samples = following.left
            shelves.append(following)
        if not samples and total < best_total:
            best = shelves
        if not best:
            return [] if not samples else None
        out = []
        for k, shelf in enumerate(best):
            for b in shelf.blocks:
                p = price(self.table, b.first, b.degree, shelf.recompute, b.samples)
                if p is None:
                    return None
                out.append(replace(p, slot=slot + k))
        return out


def lockstep_plan(
    table: Table, search: Search, area: int
) -> tuple[list[Placement], int, str] | None:
    """(placements, makespan, name) by shelves, or None when a domain cannot hold its samples."""
    n, domain = table.ranks, table.request.lockstep
    if domain == n:
        shelves = Shelves(table, 0, n).run(list(search.order), 0)
        if shelves is None:
            return None
        return (*close_plan(table, shelves), "shelves")
    inside, across = search.split(area, domain)
    out = finish(table, across)
    count = n // domain
    following, load = [0] * count, [0] * count
    for p in out:
        for d in range(p.first_rank // domain, (p.first_rank + p.degree - 1) // domain + 1):
            following[d] = max(following[d], p.slot + 1)
            load[d] += p.time_us * domain
    dealt: list[list[int]] = [[] for _ in range(count)]
    for j in inside:
        d = load.index(min(load))
        load[d] += search.time1[j]
        dealt[d].append(j)
    for d in range(count):
        some = Shelves(table, d * domain, domain).run(dealt[d], following[d])
        if some is None:
            return None
        out += some
    return (*close_plan(table, out), "shelves")
