"""Oracle, part 5: filling one shelf of a lockstep domain as csrc/planner/shelf.cc does it."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from dataclasses import dataclass, field

from megatron_dcp.planner.oracle_layout import Block
from megatron_dcp.planner.oracle_table import EMPTY, LOCAL, Table, rounded

SET_ASIDE = 8
KEEP = 0.999


@dataclass(slots=True)
class Shelf:
    recompute: int
    blocks: list[Block] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    height: int = 0
    area: float = 0.0
    busy: float = 0.0


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


class Shelving:
    """Which block every sample gets inside a height, on ranks first .. first + ranks - 1."""

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
