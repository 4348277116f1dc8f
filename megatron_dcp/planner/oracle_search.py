"""Oracle, part 3: the async search of csrc/planner/search.cc and improve.cc, step by step.

Layouts for targets that are tuned per family, local search; the portfolio keeps the layout that
ends first. All times are integer microseconds.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import replace

from megatron_dcp.planner.oracle_layout import Block, Candidate, Layout, Layouts

EFFORT = 40000
STEPS = 60000
SMALL_BATCH = 2048
FAR = 20
LARGE_ROUNDS = 3
PARTNERS = 24
NEVER = 2**63 - 1


class Search(Layouts):
    """The portfolio over the layouts of one request."""

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

    def promising(self, trial: Layout, best: Layout) -> bool:
        """Moving degree-1 samples cannot go below the wide part, nor below the mean."""
        return max(*trial.base, trial.mean) < best.end

    def widen(self, c: Candidate, budget: int, best: Layout) -> Layout:
        """Other degrees for samples of the slowest rank, one at a time, while that helps."""
        forced: dict[int, int] = {}
        degrees = list(self.table.degrees)
        better = True
        while better and budget > 0:
            better = False
            slow = best.load.index(max(best.load))
            items = [
                (j, degrees.index(b.degree))
                for b in best.wide
                if b.first <= slow < b.first + b.degree
                for j in b.samples
            ]
            items += [(j, 0) for j in self.order if best.rank_of[j] == slow]
            target = best.end - best.end // 1000
            for j, at in items:
                if better:
                    break
                for to in (at + 1, at - 1, at + 2, at - 2):
                    if to < 0 or to >= len(degrees) or budget <= 0:
                        continue
                    was = forced.get(j, 0)
                    forced[j] = degrees[to]
                    budget -= 1
                    trial = self.layout(replace(c, target=target, forced=forced))
                    if self.promising(trial, best):
                        self.improve(trial)
                    better = trial.end < best.end
                    if better:
                        best = trial
                        break
                    forced[j] = was
        return best

    # -- portfolio ------------------------------------------------------------------------------

    def tune(
        self, c: Candidate, low: int, rounds: int, best: Layout, chosen: Candidate
    ) -> tuple[Layout, Candidate]:
        """The target at which a family just succeeds, in at most `rounds` layouts."""
        high, step, reached = best.end, c.target // 400, False
        fine = 1000 if len(self.order) <= SMALL_BATCH else 500
        for _ in range(rounds):
            trial = self.layout(c)
            if self.promising(trial, best):
                self.improve(trial)
            mean = low if c.patient else max(low, trial.mean)
            if trial.end <= c.target + c.target // 2000:
                high, reached = min(high, c.target), True
            else:
                low = max(low, c.target)
            if trial.end < best.end:
                best, chosen = trial, c
            high = min(high, best.end)
            if high - mean <= mean // fine or high - low <= low // fine:
                break
            following = mean + mean // 400
            if not reached and following < low + step:
                following = low + step
                step *= 2
            if c.patient or following <= low or following >= high:
                following = low + (high - low) // 2
            c = replace(c, target=following)
        return best, chosen

    def complete(self, chosen: Candidate, layout: Layout) -> tuple[list[Block], str]:
        """The blocks of a layout and the name of its candidate."""
        blocks, single = list(layout.wide), dict[int, Block]()
        for j in self.order:
            r = layout.rank_of[j]
            if r >= 0 and r not in single:
                single[r] = Block(r, 1)
                blocks.append(single[r])
            if r >= 0:
                single[r].samples.append(j)
        name = "free" if chosen.free else "powers"
        return blocks, f"{name}{'-fill' if chosen.fill else ''}-{chosen.theta}"

    def portfolio(
        self, start: int, near: int, area: int, whole: bool, best: Layout, chosen: Candidate
    ) -> tuple[Layout, Candidate]:
        """The best of all candidates, or of those that large batches begin with."""
        effort = EFFORT // (len(self.order) + self.n)
        rounds = min(max(effort, 6), 16) if whole else LARGE_ROUNDS
        patient = whole and len(self.order) > SMALL_BATCH
        for theta in (1000, 500, 340):
            for fill in (True, False):
                more = theta < 1000 or not fill
                if more and (best.end <= area + area // 100 or not whole):
                    continue
                for free in (False, True):
                    if best.end <= area + area // 400:
                        break
                    c = Candidate(start, theta, free, fill, patient=patient)
                    if not whole and free:
                        c = replace(c, target=max(near, best.end - best.end // 400))
                    best, chosen = self.tune(c, area, rounds, best, chosen)
        return best, chosen

    def layouts(self, area: int) -> tuple[Candidate, list[Layout]]:
        """The best layout, and the one that other degrees made of it where that ends earlier."""
        best, chosen = Layout(end=NEVER), Candidate(0, 1000, False, False)
        samples = len(self.order)
        goal, near = area + area // 100, area + area // 500
        tokens = sum(s.tokens for s in self.table.samples)
        start = max(near, area + self.open1) if tokens // self.n < self.cap1 else near
        whole = samples <= SMALL_BATCH
        best, chosen = self.portfolio(start, near, area, whole, best, chosen)
        if not whole and best.end > area + area // FAR:
            whole = True
            best, chosen = self.portfolio(start, near, area, whole, best, chosen)
        self.improve(best)
        if samples <= 4 * self.n and whole and best.end > goal:
            other = self.widen(chosen, STEPS // (samples + self.n), best)
            if other.end < best.end:
                return chosen, [best, other]
        return chosen, [best]

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
