"""The mixed-integer program of one FlexSP microbatch, solved with HiGHS.

    minimise C
    A[q,p] integer >= 0: samples of length class q in group p;  m[p] binary: group p is used
    time     sum_q t[q,d_p] A[q,p] + o m[p]  <=  C                      for every group p
    memory   sum_q s_q A[q,p]                <=  capacity(d_p) m[p]     for every group p
    ranks    sum_p d_p m[p]                  <=  N
    samples  sum_p A[q,p]                     =  count_q                for every class q
    order    m[p] >= m[p+1]                                             within one degree
    work     sum_p d_p (time of p)           <=  N C               (implied, tightens the LP)

Groups p: for every degree of the ladder as many as have blocks. s_q is the longest length of its
class, t its predicted time on d ranks without the overhead o. Times are in ms inside HiGHS.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_dcp.planner.packing import blocks_of, degree_ladder
from megatron_dcp.planner.pricing import Pricer
from megatron_dcp.planner.waves import fits_topology

CLASSES = 16


@dataclass(frozen=True, slots=True)
class LengthClass:
    """Samples of near length, longest first; `longest` stands for all of them."""

    samples: tuple[int, ...]

    @property
    def longest(self) -> int:
        return self.samples[0]

    @property
    def count(self) -> int:
        return len(self.samples)


@dataclass(slots=True)
class Assignment:
    """Groups (degree, samples of each class) and the program's value, us."""

    groups: list[tuple[int, list[int]]]
    time_us: float
    proven: bool = False


def length_classes(
    lengths: Sequence[int], samples: Sequence[int], most: int = CLASSES
) -> list[LengthClass]:
    """At most `most` classes of consecutive lengths with the least sum of (longest - length).

    Exact by dynamic programming over distinct lengths; beyond 512 of them, over 512 quantiles.
    """
    order = sorted(samples, key=lambda i: (-lengths[i], i))
    distinct = sorted({lengths[i] for i in order}, reverse=True)
    if len(distinct) > 512:
        step = len(distinct) / 512
        distinct = [distinct[int(k * step)] for k in range(512)]
    edge = np.array(distinct, dtype=np.float64)
    held = np.searchsorted(-edge, [-lengths[i] for i in order], side="right") - 1
    count = np.bincount(held, minlength=len(edge)).astype(np.float64)
    tokens = np.bincount(held, weights=[lengths[i] for i in order], minlength=len(edge))
    cuts = _best_cuts(edge, count, tokens, min(most, len(edge)))
    bounds = [edge[k] for k in cuts]
    out: list[list[int]] = [[] for _ in bounds]
    for i in order:
        k = int(np.searchsorted(-np.array(bounds), -lengths[i], side="right")) - 1
        out[k].append(i)
    return [LengthClass(tuple(c)) for c in out if c]


def _best_cuts(edge: Any, count: Any, tokens: Any, most: int) -> list[int]:
    """First index of each class of edges (falling); least sum of edge[first] * count - tokens."""
    n = len(edge)
    c, t = np.concatenate([[0], np.cumsum(count)]), np.concatenate([[0], np.cumsum(tokens)])
    best = np.full((most + 1, n + 1), np.inf)
    back = np.zeros((most + 1, n + 1), dtype=np.int64)
    best[0, 0] = 0.0
    for k in range(1, most + 1):
        for end in range(1, n + 1):
            first = np.arange(end)
            waste = edge[:end] * (c[end] - c[first]) - (t[end] - t[first])
            total = best[k - 1, :end] + waste
            back[k, end] = int(np.argmin(total))
            best[k, end] = total[back[k, end]]
    k, end = int(np.argmin(best[1:, n])) + 1, n
    cuts = []
    while k > 0:
        end = int(back[k, end])
        cuts.append(end)
        k -= 1
    return cuts[::-1]


class Microbatch:
    """The program of one set of samples."""

    def __init__(self, pricer: Pricer, samples: Sequence[int], classes: int = CLASSES) -> None:
        self.pricer = pricer
        lengths = pricer.request.workload.lengths
        self.classes = length_classes(lengths, samples, classes)
        self.size = [lengths[c.longest] for c in self.classes]
        self.degrees = [
            d for d in degree_ladder(pricer.topology) if pricer.capacity(d) >= min(self.size)
        ]
        self.room = {d: pricer.capacity(d) for d in self.degrees}
        self.time = {d: [self._time_us(c.longest, d) for c in self.classes] for d in self.degrees}
        # (degree) of every candidate group, narrow degrees first, equal degrees together
        self.groups = [
            d
            for d in self.degrees
            for _ in range(min(len(blocks_of(pricer.topology, d)), len(samples)))
        ]

    def _time_us(self, sample: int, degree: int) -> int | None:
        """Without the overhead; None where it does not fit without recompute."""
        if self.pricer.packs[sample].tokens > self.pricer.capacity(degree):
            return None
        price = self.pricer.sample_price(sample, degree)
        assert price is not None
        return price.time_us - self.pricer.overhead_us

    def solve(self, seconds: float) -> Assignment | None:
        """The best assignment within the time; None when none is known or none exists."""
        start = self.greedy()
        found = self._run(seconds, start) if seconds > 0 else None
        if found is None or (start is not None and start.time_us < found.time_us):
            return start
        return found

    # -- a start --------------------------------------------------------------------------------

    def greedy(self) -> Assignment | None:
        """LPT at one degree, or the least degree of each class: the best that memory allows."""
        tries = [self._place([d] * len(blocks_of(self.pricer.topology, d))) for d in self.degrees]
        for wide in self.degrees:
            # A few blocks as wide as the longest class needs, the rest of the ranks narrower.
            for narrow in (d for d in self.degrees if d < wide):
                left = self.pricer.topology.data_ranks - wide
                if left >= narrow:
                    tries.append(self._place([wide] + [narrow] * (left // narrow)))
        return min((a for a in tries if a is not None), key=lambda a: a.time_us, default=None)

    def _place(self, degrees: list[int]) -> Assignment | None:
        """Longest class first, each sample into the group that would finish it first."""
        if not fits_topology(self.pricer.topology, degrees):
            return None
        overhead = float(self.pricer.overhead_us)
        load = np.full(len(degrees), overhead)
        room = np.array([self.room[d] for d in degrees])
        counts = [[0] * len(self.classes) for _ in degrees]
        for q, one in enumerate(self.classes):
            times = np.array([np.inf if (t := self.time[d][q]) is None else t for d in degrees])
            for _ in range(one.count):
                finish = np.where(room >= self.size[q], load + times, np.inf)
                k = int(np.argmin(finish))
                if not np.isfinite(finish[k]):
                    return None
                load[k] = finish[k]
                room[k] -= self.size[q]
                counts[k][q] += 1
        used = [(d, c) for d, c in zip(degrees, counts, strict=True) if any(c)]
        return Assignment(used, float(max(load[k] for k, c in enumerate(counts) if any(c))))

    # -- the program ----------------------------------------------------------------------------

    def _run(self, seconds: float, start: Assignment | None) -> Assignment | None:
        import highspy
        from highspy._core import _Highs  # highspy.Highs prints a banner on stdout when it is made

        columns, program = self._program()
        solver: Any = _Highs()
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("threads", 1)
        solver.setOptionValue("mip_rel_gap", 1e-5)
        solver.setOptionValue("time_limit", float(seconds))
        solver.passModel(program)
        if start is not None:
            solution = highspy.HighsSolution()
            solution.col_value = self._start_values(columns, start)
            solver.setSolution(solution)
        solver.run()
        if solver.getInfo().primal_solution_status != 2:  # no feasible point
            return None
        values = solver.getSolution().col_value
        groups = []
        for p, degree in enumerate(self.groups):
            counts = [
                0 if (col := columns.get((q, p))) is None else round(values[col])
                for q in range(len(self.classes))
            ]
            if any(counts):
                groups.append((degree, counts))
        proven = solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
        return Assignment(groups, max(self.group_us(d, c) for d, c in groups), proven)

    def group_us(self, degree: int, counts: Sequence[int]) -> float:
        """Time of a group in the program's own terms."""
        return self.pricer.overhead_us + sum(
            n * t for n, t in zip(counts, self.time[degree], strict=True) if n and t is not None
        )

    def _program(self) -> tuple[dict[tuple[int, int], int], Any]:
        """Columns of A[q,p], and the HiGHS model. Column 0 is C, then m[p], then A."""
        import highspy

        groups, n = self.groups, self.pricer.topology.data_ranks
        columns: dict[tuple[int, int], int] = {}
        for p, d in enumerate(groups):
            for q in range(len(self.classes)):
                if self.time[d][q] is not None:
                    columns[q, p] = 1 + len(groups) + len(columns)
        rows = _Rows()
        overhead = self.pricer.overhead_us / 1000.0
        work: list[tuple[int, float]] = [(0, -float(n))]
        for p, d in enumerate(groups):
            own = [(q, columns[q, p]) for q in range(len(self.classes)) if (q, p) in columns]
            timed = [(col, (self.time[d][q] or 0) / 1000.0) for q, col in own]
            rows.add([(0, -1.0), (1 + p, overhead), *timed], -np.inf, 0.0)
            rows.add(
                [(1 + p, -float(self.room[d])), *((col, float(self.size[q])) for q, col in own)],
                -np.inf,
                0.0,
            )
            work += [(1 + p, d * overhead), *((col, d * t) for col, t in timed)]
            if p + 1 < len(groups) and groups[p + 1] == d:
                rows.add([(1 + p, 1.0), (2 + p, -1.0)], 0.0, np.inf)
        rows.add([(1 + p, float(d)) for p, d in enumerate(groups)], -np.inf, float(n))
        for q, one in enumerate(self.classes):
            terms = [(col, 1.0) for (k, _), col in columns.items() if k == q]
            rows.add(terms, float(one.count), float(one.count))
        rows.add(work, -np.inf, 0.0)
        model = highspy.HighsLp()
        model.num_col_ = 1 + len(groups) + len(columns)
        model.col_cost_ = np.array([1.0] + [0.0] * (model.num_col_ - 1))
        upper = [np.inf] + [1.0] * len(groups) + [float(self.classes[q].count) for q, _ in columns]
        model.col_lower_ = np.zeros(model.num_col_)
        model.col_upper_ = np.array(upper)
        integer, continuous = highspy.HighsVarType.kInteger, highspy.HighsVarType.kContinuous
        model.integrality_ = [continuous] + [integer] * (model.num_col_ - 1)
        rows.write(model, highspy.MatrixFormat.kRowwise)
        return columns, model

    def _start_values(self, columns: dict[tuple[int, int], int], start: Assignment) -> list[float]:
        values = [0.0] * (1 + len(self.groups) + len(columns))
        values[0] = start.time_us / 1000.0
        free = {d: iter([p for p, x in enumerate(self.groups) if x == d]) for d in self.degrees}
        for degree, counts in start.groups:
            p = next(free[degree])
            values[1 + p] = 1.0
            for q, count in enumerate(counts):
                if count:
                    values[columns[q, p]] = float(count)
        return values


class _Rows:
    """Constraint rows in the compressed form of HiGHS."""

    def __init__(self) -> None:
        self.start: list[int] = [0]
        self.index: list[int] = []
        self.value: list[float] = []
        self.lower: list[float] = []
        self.upper: list[float] = []

    def add(self, terms: Sequence[tuple[int, float]], lower: float, upper: float) -> None:
        self.index += [col for col, _ in terms]
        self.value += [value for _, value in terms]
        self.start.append(len(self.index))
        self.lower.append(lower)
        self.upper.append(upper)

    def write(self, model: Any, row_wise: Any) -> None:
        model.num_row_ = len(self.lower)
        model.row_lower_, model.row_upper_ = np.array(self.lower), np.array(self.upper)
        model.a_matrix_.format_ = row_wise
        model.a_matrix_.start_ = np.array(self.start)
        model.a_matrix_.index_ = np.array(self.index)
        model.a_matrix_.value_ = np.array(self.value)
