"""Oracle, part 5: lockstep domains as csrc/planner/shelves.cc plans them."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from dataclasses import dataclass, field, replace

from megatron_dcp.plan import Placement
from megatron_dcp.planner.oracle_finish import close_plan, finish, price
from megatron_dcp.planner.oracle_layout import Block
from megatron_dcp.planner.oracle_search import NEVER, Search
from megatron_dcp.planner.oracle_table import EMPTY, LOCAL, Table, rounded

MAX_SHELVES = 4096
SET_ASIDE = 8
LEVELS = 16
COARSE = 4
MOST_DEALT = 3
KEEP = 0.999
INFINITY = float("inf")


@dataclass(slots=True)
class Shelf:
    recompute: int
    blocks: list[Block] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    height: int = 0
    area: float = 0.0
    busy: float = 0.0


@dataclass(slots=True)
class Stack:
    shelves: list[Shelf] = field(default_factory=list)
    total: int = NEVER // 4


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


@dataclass(frozen=True, slots=True)
class Single:
    """Every sample on one rank with one recompute value: us in an open pack."""

    open: int
    cap: int
    time: list[int]


class Singles:
    def __init__(self, table: Table) -> None:
        self.table = table
        self._levels: dict[int, Single] = {}

    def at(self, r: int) -> Single:
        if r not in self._levels:
            table, opening = self.table, self.table.opening(1, LOCAL, r)
            time = [
                rounded(table.alone(s, 1, LOCAL, r)[0] + table.overhead) - opening
                for s in table.samples
            ]
            self._levels[r] = Single(opening, table.cap(1, 0, r), time)
        return self._levels[r]


class Shelves:
    """Shelves on ranks first .. first + ranks - 1."""

    def __init__(self, table: Table, singles: Singles, first: int, ranks: int) -> None:
        self.table, self.singles, self.ranks = table, singles, ranks
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

    def again(self, r: int) -> float:
        f = self.table.request.profile.recompute_fraction
        return 1.0 + min(f.linear, f.attention) * (r / self.table.layers)

    def fit(self, sample: int, height: int, r: int) -> Fit:
        """Degree of least work that ends inside the height with exactly this recompute."""
        table, s = self.table, self.table.samples[sample]
        floor = table.area[sample] * self.again(r) * (1.0 - 1e-9)
        best, least = Fit(), 0.0
        for d in self.degrees:
            if floor > float(height) * d:
                continue
            if best.degree and floor + float(s.tokens) * table.wire_from[d] >= least * KEEP:
                break
            for m, mode in enumerate(table.modes[d]):
                cap = table.cap(d, m, r)
                if s.tokens > cap:
                    continue
                alone = table.alone(s, d, mode, r)[0]
                total = rounded(alone + table.overhead)
                if total > height or (best.degree and alone * d >= least * KEEP):
                    continue
                opening = table.opening(d, mode, r)
                best, least = Fit(d, m, total - opening, opening, cap), alone * d
            if best.degree and d == 1:
                break
        return best

    def fastest(self, sample: int) -> int:
        s = self.table.samples[sample]
        times = [self.table.best_mode(s, d, -1)[0] for d in self.degrees]
        return min((t for t in times if t >= 0), default=-1)

    def load(self, samples: list[int]) -> tuple[float, int]:
        """(rank-us on one rank, tokens) of samples that a shelf is to hold."""
        area, tokens = 0.0, 0
        for j in samples:
            area += self.table.area[j]
            tokens += self.table.samples[j].tokens
        return area, tokens

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

    def fill_gaps(self, height: int, r: int, small: list[int], opened: list[Open]) -> list[int]:
        """Short samples join the wide blocks; returns those that are left."""
        table, time = self.table, self.singles.at(r).time
        falling = [-time[j] for j in small]
        used = [False] * len(small)
        for o in opened:
            if o.degree > table.per_node:
                continue
            mode = table.modes[o.degree][o.mode]
            empty = rounded(table.alone(EMPTY, o.degree, mode, r)[0] + table.overhead)
            while o.end < height:
                taken = -1
                i = bisect_left(falling, -(height - o.end) * o.degree)
                while i < len(small):
                    s = table.samples[small[i]]
                    if used[i] or s.tokens > o.room:
                        i += 1
                        continue
                    t = rounded(table.alone(s, o.degree, mode, r)[0] + table.overhead) - empty
                    if o.end + t <= height:
                        taken = i
                        break
                    # Too long: look on where samples are shorter by as much.
                    share = float(height - o.end) / float(t)
                    i = max(i + 1, bisect_left(falling, -int(share * float(time[small[i]]))))
                if taken < 0:
                    break
                o.end += t
                o.room -= s.tokens
                o.samples.append(small[taken])
                used[taken] = True
        return [j for i, j in enumerate(small) if not used[i]]

    def place_small(
        self, small: list[int], r: int, height: int, used: list[int], whole: bool,
        opened: list[Open], left: list[int],
    ) -> None:  # fmt: skip
        """Longest first onto the ranks that are left; ranks out of tokens are passed over."""
        one = self.singles.at(r)
        heap: list[tuple[int, int]] = []
        for k, (first, size) in enumerate(self.pieces):
            for f in range(first + used[k], first + size):
                heap.append((one.open, len(opened)))
                opened.append(Open(f, 1, 0, one.open, one.cap, []))
        heapq.heapify(heap)
        for j in small:
            tokens = self.table.samples[j].tokens
            placed, aside = False, list[tuple[int, int]]()
            while not placed and heap and len(aside) < SET_ASIDE:
                end, k = heap[0]
                if end + one.time[j] > height:
                    break
                heapq.heappop(heap)
                o = opened[k]
                if o.room < tokens:
                    aside.append((end, k))
                    continue
                o.room -= tokens
                o.end = end + one.time[j]
                o.samples.append(j)
                heapq.heappush(heap, (o.end, k))
                placed = True
            for entry in aside:
                heapq.heappush(heap, entry)
            if placed:
                continue
            left.append(j)
            if whole:
                return

    def fill(self, samples: list[int], height: int, r: int, whole: bool) -> Shelf | None:
        """One shelf; `whole`: None when a sample would be left."""
        shelf, one = Shelf(r), self.singles.at(r)
        wide: list[tuple[int, Fit]] = []
        small: list[int] = []
        for j in samples:
            if one.time[j] + one.open <= height and self.table.samples[j].tokens <= one.cap:
                small.append(j)
                continue
            f = self.fit(j, height, r)
            if f.degree > 0:
                wide.append((j, f))
            else:
                shelf.left.append(j)
        if whole and shelf.left:
            return None
        wide.sort(key=lambda x: -x[1].degree)
        small.sort(key=lambda j: -one.time[j])
        used, opened = [0] * len(self.pieces), list[Open]()
        self.place_wide(wide, height, used, opened, shelf.left)
        if whole and shelf.left:
            return None
        small = self.fill_gaps(height, r, small, opened)
        self.place_small(small, r, height, used, whole, opened, shelf.left)
        if whole and shelf.left:
            return None
        for o in opened:
            if not o.samples:
                continue
            shelf.height = max(shelf.height, o.end)
            shelf.busy += (float(o.end) - self.table.overhead) * o.degree / self.again(r)
            for j in o.samples:
                shelf.area += self.table.area[j]
            shelf.blocks.append(Block(o.first, o.degree, o.samples))
        shelf.left.sort(key=lambda j: (-self.table.area[j], j))
        return shelf

    def close(self, samples: list[int], ceiling: int) -> Shelf | None:
        """One shelf for everything, as low as bisection finds, below the ceiling."""
        area, tokens = self.load(samples)
        longest = self.fastest(samples[0])
        found: Shelf | None = None
        misses = 0
        for r in self.levels:
            if tokens > self.singles.at(r).cap * self.ranks:
                continue
            if misses >= 2:
                break
            mean = int(area * self.again(r) / self.ranks + self.table.overhead)
            best = self._bisect(samples, max(longest, mean), ceiling, r)
            if best is not None and best.height < ceiling:
                ceiling, found, misses = best.height, best, 0
            elif found is not None:
                misses += 1
        return found

    def _bisect(self, samples: list[int], start: int, ceiling: int, r: int) -> Shelf | None:
        low, high, step = start - 1, start, max(1, start // 64)
        best: Shelf | None = None
        while high < ceiling and high <= 64 * start:
            best = self.fill(samples, high, r, True)
            if best is not None:
                break
            low = high
            high += step
            step *= 2
        while best is not None and high - low > max(1, high // 256):
            middle = low + (high - low) // 2
            s = self.fill(samples, middle, r, True)
            if s is not None:
                best, high = s, middle
            else:
                low = middle
        return best

    def _estimate(self, load: tuple[float, int], count: int) -> float:
        """What samples take at least in `count` shelves, by memory and overheads."""
        area, tokens = load
        for r in self.levels:
            if tokens <= self.singles.at(r).cap * self.ranks * count:
                return area * self.again(r) / self.ranks + self.table.overhead * count
        return INFINITY

    def estimate(self, load: tuple[float, int]) -> float:
        if load[1] == 0:
            return 0.0
        most = max(1, self.singles.at(self.levels[-1]).cap * self.ranks)
        fewest = load[1] // most + 1
        return min(self._estimate(load, c) for c in range(fewest, fewest + MOST_DEALT + 1))

    def deal(self, samples: list[int], ceiling: int) -> list[Shelf] | None:
        """Several shelves of like mixture: samples are dealt in turn."""
        load, found = self.load(samples), None
        for count in range(2, min(MOST_DEALT, len(samples)) + 1):
            if self._estimate(load, count) >= float(ceiling):
                continue
            shelves: list[Shelf] = []
            total = 0
            for k in range(count):
                if total >= ceiling:
                    break
                shelf = self.close(samples[k::count], ceiling - total)
                if shelf is None:
                    break
                total += shelf.height
                shelves.append(shelf)
                if total * count >= ceiling * (k + 1):
                    break
            if len(shelves) == count and total < ceiling:
                ceiling, found = total, shelves
        return found

    def best_shelf(self, samples: list[int], wide: bool) -> Shelf | None:
        """The shelf of most worth per height, among heights that the longest sample suggests."""
        table = self.table
        longest, lowest = table.samples[samples[0]], self.fastest(samples[0])
        best, found = -1.0, None
        for d in self.degrees:
            if d & (d - 1):
                continue
            for r in self.levels[::COARSE]:
                height = table.best_mode(longest, d, r)[0]
                if height < 0 or height > 12 * lowest:
                    continue
                if (float(height) - table.overhead) / self.again(r) <= best * float(height):
                    continue
                s = self.fill(samples, height, r, False)
                assert s is not None
                if s.height == 0:
                    continue
                rate = (s.busy if wide else s.area) / (float(s.height) * self.ranks)
                if rate > best:
                    best, found = rate, s
        return found

    def stack(self, samples: list[int], wide: bool, best: Stack) -> Stack:
        """Shelf after shelf, and at every step what is left in one more, or in several."""
        now = Stack(total=0)
        last: list[int] = []
        kept = 0
        for k in range(MAX_SHELVES):
            if not samples or now.total >= best.total:
                break
            if not (wide and k == 0):
                shelf = self.close(samples, best.total - now.total)
                if shelf is not None:
                    last, kept = list(samples), len(now.shelves)
                    best = Stack([*now.shelves, shelf], now.total + shelf.height)
            if float(now.total) + self.estimate(self.load(samples)) >= float(best.total):
                break
            following = self.best_shelf(samples, wide)
            if following is None:
                break
            now.total += following.height
            samples = following.left
            now.shelves.append(following)
        if not samples and now.total < best.total:
            best, last = now, []
        if not last:
            return best
        height = best.shelves[-1].height
        several = self.deal(last, height)
        if several is None:
            return best
        total = best.total - height + sum(s.height for s in several)
        return Stack([*best.shelves[:kept], *several], total)

    def run(self, samples: list[int], slot: int) -> list[Placement] | None:
        """Placements from `slot` on; None when some sample does not fit here."""
        best = Stack()
        for wide in (False, True):
            best = self.stack(list(samples), wide, best)
        if not best.shelves:
            return [] if not samples else None
        out = []
        for k, shelf in enumerate(best.shelves):
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
    singles = Singles(table)
    if domain == n:
        shelves = Shelves(table, singles, 0, n).run(list(search.order), 0)
        if shelves is None:
            return None
        return (*close_plan(table, shelves), "shelves")
    inside, across = search.split(area, domain)
    out = finish(table, across)[0]
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
        some = Shelves(table, singles, d * domain, domain).run(dealt[d], following[d])
        if some is None:
            return None
        out += some
    return (*close_plan(table, out), "shelves")
