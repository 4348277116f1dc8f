"""Oracle, part 1: what a sample costs on every degree, and the lower bound.

Reads like csrc/planner/table.cc and bound.cc, and computes the same doubles in the same order. It
prices through `CostModel`, so that equal plans also show that C++ mirrors the formulas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_dcp.cost import Mode, Pack, workload_packs
from megatron_dcp.cost.model import in_flight, wire_bytes
from megatron_dcp.errors import PlanError
from megatron_dcp.plan.types import NOMINAL_SPEED
from megatron_dcp.planner.registry import PlanRequest

SLACK = 1.0 - 1e-9
LOCAL = Mode("local", 1)
EMPTY = Pack()
INFINITY = float("inf")


def rounded(us: float) -> int:
    return math.floor(us + 0.5)


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run a sample; degree 0: none. alone, work: us and amortised rank-us."""

    degree: int = 0
    mode: int = 0
    recompute: int = 0
    alone: float = 0.0
    work: float = INFINITY


class Table:
    """Options, memory limits and amortised work of one request."""

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self.cost = request.cost
        self.layers = self.cost.layers
        self.samples = workload_packs(request.profile, request.workload)
        topology, p = request.topology, request.profile
        n, m = topology.data_ranks, topology.ranks_per_node
        self.ranks, self.per_node, self.stages = n, m, topology.pipeline_stages
        self.degrees = topology.degrees()
        self.modes = {d: self.cost.modes(d) for d in self.degrees}
        self.overhead = float(self.cost.overhead_us)
        self._caps: dict[tuple[int, int, int], int] = {}
        probe = 1 << 20
        self.wires = {
            d: [d * self.unhidden_us(probe, d, mode) / probe for mode in self.modes[d]]
            for d in self.degrees
        }
        self.wire = {d: min(w) for d, w in self.wires.items()}
        self.wire_from: dict[int, float] = {}
        least = INFINITY
        for d in reversed(self.degrees):
            least = min(least, self.wire[d])
            self.wire_from[d] = least * SLACK
        self.net_budget = float(request.budget_bytes) - p.static_bytes
        self.bound_overhead = self.overhead - 0.5 if self.overhead >= 0.5 else 0.0
        self.per_token: list[float] = []
        self.memory_share: list[float] = []
        for r in range(self.layers + 1):
            share = self.bytes_per_token(r) / self.net_budget if self.net_budget > 0.0 else 0.0
            linear = p.linear_us_per_token * (1.0 + p.linear_half_tokens * share) / self.stages
            linear = linear * (1.0 + p.recompute_fraction.linear * (r / self.layers))
            self.memory_share.append(share)
            self.per_token.append(linear + self.bound_overhead * share)
        self.monotone = all(
            a <= b for a, b in zip(self.per_token, self.per_token[1:], strict=False)
        )
        self.area: list[float] = []
        self.floor: list[float] = []
        for s in self.samples:
            attention = self.cost.parts_us(s, 1, LOCAL, 0)[1]
            self.area.append(attention + p.linear_us_per_token * float(s.tokens) / self.stages)
            # Over every recompute; without one where more never amortises better.
            floor = float(s.tokens) * self.per_token[0] + attention
            for r in range(1, 1 if self.monotone else self.layers + 1):
                again = 1.0 + p.recompute_fraction.attention * (r / self.layers)
                floor = min(floor, float(s.tokens) * self.per_token[r] + attention * again)
            self.floor.append(floor)

    def in_family(self, degree: int, free: bool) -> bool:
        """Powers of two inside a node and of nodes, the whole node, all ranks; or any degree."""
        if free:
            return True
        if degree <= self.per_node:
            return degree & (degree - 1) == 0 or degree == self.per_node
        k = degree // self.per_node
        return k & (k - 1) == 0 or degree == self.ranks

    def overlap(self, scheme: str) -> float:
        o = self.request.profile.overlap
        if scheme == "ulysses":
            return o.ulysses
        return o.allgather if scheme == "allgather" else o.ring

    def unhidden_us(self, tokens: int, degree: int, mode: Mode) -> float:
        """Wire time without latency; what a scheme may hide counts as hidden."""
        if degree == 1 or self.overlap(mode.scheme) > 0.0:
            return 0.0
        p = self.request.profile
        inner, outer = wire_bytes(p, mode, tokens, degree)
        return (
            inner * self.layers * p.link(mode.inner_degree).us_per_byte
            + outer * self.layers * p.link(degree).us_per_byte
        )

    def bytes_per_token(self, recompute: int) -> float:
        p = self.request.profile
        kept = p.kept_bytes_per_token_layer * (self.layers - recompute)
        stored = kept + p.checkpoint_bytes_per_token_layer * recompute
        per_token = stored * in_flight(self.request.topology)
        return per_token + p.working_bytes_per_token + p.head_bytes_per_token

    def bytes(self, tokens: int, degree: int, mode: Mode, recompute: int) -> int:
        return self.cost.bytes(Pack(tokens), degree, mode, recompute)

    def alone(self, pack: Pack, degree: int, mode: Mode, recompute: int) -> tuple[float, float]:
        """(time without overhead, its attention part), us."""
        linear, attention, comm = self.cost.parts_us(pack, degree, mode, recompute)
        return linear + attention + comm, attention

    def opening(self, degree: int, mode: Mode, recompute: int = 0) -> int:
        """What opening a pack adds, us: overhead, latency, half-efficiency tokens."""
        return rounded(self.alone(EMPTY, degree, mode, recompute)[0] + self.overhead)

    def cap(self, degree: int, mode: int, recompute: int) -> int:
        """Most tokens of one placement, by bisection."""
        key = (degree, mode, recompute)
        if key not in self._caps:
            how, budget = self.modes[degree][mode], self.request.budget_bytes
            low, high = 0, 1 << 40
            if self.bytes(high, degree, how, recompute) <= budget:
                low = high
            while high - low > 1:
                middle = low + (high - low) // 2
                if self.bytes(middle, degree, how, recompute) <= budget:
                    low = middle
                else:
                    high = middle
            self._caps[key] = low
        return self._caps[key]

    def least_recompute(self, tokens: int, degree: int, mode: int) -> int:
        """Least recompute with which the tokens fit, or -1."""
        if tokens <= self.cap(degree, mode, 0):
            return 0
        if not self.request.recompute or tokens > self.cap(degree, mode, self.layers):
            return -1
        how = self.modes[degree][mode]
        low, high = 0, self.layers
        while high - low > 1:
            middle = (low + high) // 2
            if self.bytes(tokens, degree, how, middle) <= self.request.budget_bytes:
                high = middle
            else:
                low = middle
        return high

    def _work(self, tokens: int, attention: float, wire: float, r: int) -> float:
        wire = wire * (1.0 + self.request.profile.recompute_fraction.comm * (r / self.layers))
        return float(tokens) * self.per_token[r] + attention + float(tokens) * wire

    def cheapest(self, sample: int, limit: float, free: bool, keep: float = 1.0) -> Option:
        """The option of least work whose time alone plus overhead is at most `limit`.

        keep below 1: the search's work, communication counted as it is; a wider block must bring it
        below `keep` times what a narrower one takes. 1: the bound's, which may leave some out.
        """
        s, best = self.samples[sample], Option()
        floor, tokens = self.floor[sample] * SLACK, float(s.tokens)
        area = self.area[sample] * SLACK
        for d in self.degrees:
            if area > limit * d or not self.in_family(d, free):
                continue
            if floor + tokens * self.wire_from[d] >= best.work * SLACK:
                break
            for m, mode in enumerate(self.modes[d]):
                first = self.least_recompute(s.tokens, d, m)
                if first < 0:
                    continue
                last = first if self.monotone or not self.request.recompute else self.layers
                for r in range(first, last + 1):
                    alone, attention = self.alone(s, d, mode, r)
                    if alone + self.overhead > limit:
                        break
                    if keep < 1.0:
                        w = alone * d + tokens * (self.bound_overhead * self.memory_share[r])
                    else:
                        w = self._work(s.tokens, attention * d, self.wires[d][m], r)
                    if w < best.work * keep:
                        best = Option(d, m, r, alone, w)
        return best

    def on(self, sample: int, degree: int) -> Option:
        """The option of least time alone on one degree."""
        s, best = self.samples[sample], Option()
        for m, mode in enumerate(self.modes[degree]):
            r = self.least_recompute(s.tokens, degree, m)
            if r < 0:
                continue
            alone, attention = self.alone(s, degree, mode, r)
            if best.degree == 0 or alone < best.alone:
                w = self._work(s.tokens, attention * degree, self.wires[degree][m], r)
                best = Option(degree, m, r, alone, w)
        return best

    def fastest(self, sample: int) -> Option:
        """The option of least time alone, over every legal degree."""
        best, area = Option(), self.area[sample] * SLACK
        for d in self.degrees:
            if best.degree and area > best.alone * d:
                continue
            o = self.on(sample, d)
            if o.degree and (best.degree == 0 or o.alone < best.alone):
                best = o
        return best

    def best_mode(self, pack: Pack, degree: int, exact: int) -> tuple[int, int, int]:
        """(time at nominal speed or -1, mode, recompute) of a whole pack; exact -1: the least."""
        best, mode, recompute = -1, 0, 0
        for m, how in enumerate(self.modes[degree]):
            need = self.least_recompute(pack.tokens, degree, m)
            if need < 0 or (exact >= 0 and pack.tokens > self.cap(degree, m, exact)):
                continue
            r = exact if exact >= 0 else need
            t = self.cost.time_us(pack, degree, how, r)
            if best < 0 or t < best:
                best, mode, recompute = t, m, r
        return best, mode, recompute

    def require_feasible(self) -> None:
        """Raises PlanError when a sample fits nowhere."""
        full = self.layers if self.request.recompute else 0
        most = max(
            self.cap(d, m, r) for r in {0, full} for d in self.degrees
            for m in range(len(self.modes[d]))
        )  # fmt: skip
        for j, s in enumerate(self.samples):
            if s.tokens > most:
                raise PlanError(
                    f"sample {j} of {s.tokens} tokens fits on no block", invariant="fits_memory"
                )


def _within(a: Pack, b: Pack) -> bool:
    return (
        a.tokens <= b.tokens and a.pairs <= b.pairs and a.half <= b.half
        and a.pairs2 <= b.pairs2 and a.half2 <= b.half2
    )  # fmt: skip


def _distinct(table: Table) -> list[tuple[int, int, Option]]:
    """(a sample, how many have its sums, least work without a limit), in a fixed order."""
    packs = table.samples
    order = sorted(
        range(len(packs)), key=lambda j: (-packs[j].tokens, -packs[j].pairs, -packs[j].pairs2, j)
    )
    out: list[tuple[int, int, Option]] = []
    for j in order:
        if out and packs[out[-1][0]] == packs[j]:
            out[-1] = (out[-1][0], out[-1][1] + 1, out[-1][2])
        else:
            out.append((j, 1, table.cheapest(j, INFINITY, True)))
    return out


def _area_bound(table: Table, items: list[tuple[int, int, Option]], start: int, fast: int) -> int:
    speed = table.request.topology.speed
    ranks = float(table.ranks) if speed is None else float(sum(speed)) / NOMINAL_SPEED
    total = 0.0
    for _, count, option in items:
        total = total + option.work * count
    low = max(start, math.ceil(total / ranks))

    def limit(c: int) -> float:
        return float(c) * fast / NOMINAL_SPEED + 0.5

    active, fixed = [], 0.0
    for j, count, option in items:
        if option.alone + table.overhead <= limit(low):
            fixed = fixed + option.work * count
        else:
            active.append((j, count))

    def fits(c: int) -> bool:
        used = fixed
        for j, count in active:
            best = table.cheapest(j, limit(c), True)
            if best.degree == 0:
                return False
            used = used + best.work * count
            if used > float(c) * ranks:
                return False
        return used <= float(c) * ranks

    if fits(low):
        return low
    step = max(1, low // 64)
    high = low + step
    while not fits(high):
        low = high
        step *= 2
        high += step
    while high - low > 1:
        middle = low + (high - low) // 2
        if fits(middle):
            high = middle
        else:
            low = middle
    return high


def lower_bound(table: Table) -> tuple[int, int]:
    """(the bound with its lockstep and pipeline terms, its async part), us."""
    request, o = table.request, table.overhead
    fast = max(request.topology.speed or (NOMINAL_SPEED,))
    items = _distinct(table)
    tau, tokens, worst = 0.0, 0, None
    for j, count, option in items:
        s = table.samples[j]
        tokens += s.tokens * count
        if option.alone <= tau or (worst is not None and _within(s, worst)):
            continue
        alone = table.fastest(j).alone
        if alone > tau:
            tau, worst = alone, s
    longest = rounded((tau + o) * NOMINAL_SPEED / fast)
    area = _area_bound(table, items, longest, fast)
    if o < 0.5:
        area = max(longest, area - (len(table.samples) + 1) // 2)
    bound = max(longest, area)
    if request.lockstep == table.ranks and table.ranks > 1:
        least = table.bytes_per_token(0)
        if request.recompute:
            least = min(least, table.bytes_per_token(table.layers))
        slots = 1.0
        if table.net_budget > 0.0:
            room = table.ranks * table.net_budget
            slots = max(1.0, float(math.ceil(float(tokens) * least / room)))
        bound = max(bound, math.floor((tau + table.bound_overhead * slots) * NOMINAL_SPEED / fast))
    return bound + (table.stages - 1) * longest, area
