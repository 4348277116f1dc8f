"""Oracle, part 6: lockstep domains as csrc/planner/shelves.cc plans them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from megatron_dcp.cost import Pack
from megatron_dcp.plan import Placement
from megatron_dcp.planner.oracle_finish import close_plan, finish, price
from megatron_dcp.planner.oracle_search import NEVER, Search
from megatron_dcp.planner.oracle_shelf import Shelf, Shelving, Singles
from megatron_dcp.planner.oracle_table import Table

MAX_SHELVES = 4096
LEVELS = 16
COARSE = 4
MOST_DEALT = 3
INFINITY = float("inf")


@dataclass(slots=True)
class Stack:
    shelves: list[Shelf] = field(default_factory=list)
    total: int = NEVER // 4


class Shelves(Shelving):
    """Shelves on ranks first .. first + ranks - 1."""

    def __init__(self, table: Table, singles: Singles, first: int, ranks: int) -> None:
        super().__init__(table, singles, first, ranks)
        steps = LEVELS if table.request.recompute else 0
        self.levels = sorted({table.layers * k // LEVELS for k in range(steps + 1)})

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

    def _price_blocks(self, shelf: Shelf, r: int) -> list[Placement] | None:
        """Every block of the shelf with exactly `r` recomputed layers; None: one does not fit."""
        placed = [price(self.table, b.first, b.degree, r, b.samples) for b in shelf.blocks]
        return None if None in placed else [p for p in placed if p is not None]

    def _settle(self, shelf: Shelf) -> list[Placement] | None:
        """A shelf was filled for one of a few recompute values; its blocks may need less."""
        table, least = self.table, 0
        for b in shelf.blocks:
            pack = Pack()
            for j in b.samples:
                pack = pack + table.samples[j]
            time, _, r = table.best_mode(pack, b.degree, -1)
            least = max(least, r if time >= 0 else 0)
        own = self._price_blocks(shelf, shelf.recompute)
        if least >= shelf.recompute:
            return own
        lean = self._price_blocks(shelf, least)
        if lean is None or (own is not None and _height(lean) > _height(own)):
            return own
        return lean

    def run(self, samples: list[int], slot: int) -> list[Placement] | None:
        """Placements from `slot` on; None when some sample does not fit here."""
        best = Stack()
        for wide in (False, True):
            best = self.stack(list(samples), wide, best)
        if not best.shelves:
            return [] if not samples else None
        out: list[Placement] = []
        for k, shelf in enumerate(best.shelves):
            placed = self._settle(shelf)
            if placed is None:
                return None
            out += [replace(p, slot=slot + k) for p in placed]
        return out


def _height(placements: list[Placement]) -> int:
    return max((p.time_us for p in placements), default=0)


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
