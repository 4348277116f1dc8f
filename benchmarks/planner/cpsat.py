"""`dcp` against CP-SAT on small instances: 8 ranks, at most 16 samples, cost profile `a100-gpt7b`.

The model: every sample in one pack; a pack has a window of 1 to 8 neighbouring ranks, one of nine
recompute values, one overhead; packs that share a rank do not overlap in time. It is handed the
plan of `dcp` as a hint and stops at its time limit, so its result is the optimum or the best found
and never slower than the plan (its times are rounded down, sample by sample).

    python benchmarks/planner/cpsat.py --seconds 30        # prints the table of benchmarks/results
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_dcp.cost import Pack, resolve, workload_packs
from megatron_dcp.data.lengths import read_lengths
from megatron_dcp.plan import StepPlan, Topology, Workload
from megatron_dcp.planner import PlanRequest, make_plan

RANKS = 8
LEVELS = range(0, 33, 4)
PACKS = {1: 3}  # packs of one window: three on one rank, two on wider ones
LENGTHS = Path(__file__).parents[2] / "tests" / "data" / "lengths"
CASES = [(name, n, seed) for name in ("wiki", "prolong", "heavy")
         for n, seed in zip((8, 10, 12, 16, 8, 10, 12, 16), range(8), strict=True)]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """makespans in us; optimal: whether the solver proved that nothing is faster."""

    dcp_us: int
    best_us: int
    bound_us: int
    optimal: bool

    @property
    def ratio(self) -> float:
        return self.dcp_us / self.best_us


def request_of(name: str, samples: int, seed: int) -> PlanRequest:
    """Seed s of a file as `mdcp bench planner` draws it."""
    pool = np.asarray(read_lengths(LENGTHS / f"{name}_16384.txt"))
    drawn = np.random.default_rng(seed).choice(pool, samples, replace=False)
    return PlanRequest(
        workload=Workload(lengths=tuple(int(x) for x in drawn)),
        topology=Topology(data_ranks=RANKS, ranks_per_node=RANKS),
        profile=resolve("a100-gpt7b"),
    )


def _most_tokens(request: PlanRequest, degree: int, recompute: int) -> int:
    mode = request.cost.modes(degree)[0]
    low, high = 0, 1 << 24
    while high - low > 1:
        middle = (low + high) // 2
        if request.cost.bytes(Pack(middle), degree, mode, recompute) <= request.budget_bytes:
            low = middle
        else:
            high = middle
    return low


def _hint_of(plan: StepPlan) -> dict[tuple[int, int, int], tuple[tuple[int, ...], int]]:
    """(first, degree, k-th pack of the window) -> (samples, recompute)."""
    out: dict[tuple[int, int, int], tuple[tuple[int, ...], int]] = {}
    for p in plan.placements:
        k = 0
        while (p.first_rank, p.degree, k) in out:
            k += 1
        out[p.first_rank, p.degree, k] = (p.samples, p.recompute)
    return out


def best_found(request: PlanRequest, seconds: float, workers: int = 2) -> Found:
    """Plan with `dcp`, then let CP-SAT look for something faster."""
    from ortools.sat.python import cp_model

    plan = make_plan(request)
    packs = workload_packs(request.profile, request.workload)
    cost, horizon = request.cost, plan.makespan_us
    overhead = math.floor(cost.overhead_us)
    model = cp_model.CpModel()
    hint = _hint_of(plan)
    holds: list[list[object]] = [[] for _ in packs]
    on_rank: list[list[object]] = [[] for _ in range(RANKS)]
    makespan = model.new_int_var(plan.lower_bound_us, horizon, "makespan")
    for degree in range(1, RANKS + 1):
        mode = cost.modes(degree)[0]
        caps = {r: _most_tokens(request, degree, r) for r in LEVELS}
        times = {
            r: [math.floor(sum(cost.parts_us(p, degree, mode, r))) for p in packs] for r in LEVELS
        }
        for first in range(RANKS - degree + 1):
            before = None
            for k in range(PACKS.get(degree, 2)):
                samples, recompute = hint.get((first, degree, k), ((), 0))
                used = model.new_bool_var("")
                start = model.new_int_var(0, horizon, "")
                end = model.new_int_var(0, horizon, "")
                size = model.new_int_var(0, horizon, "")
                interval = model.new_optional_interval_var(start, size, end, used, "")
                inside = [model.new_bool_var("") for _ in packs]
                level = {r: model.new_bool_var("") for r in LEVELS}
                model.add_exactly_one(level.values())
                tokens = sum(x * p.tokens for x, p in zip(inside, packs, strict=True))
                for r, chosen in level.items():
                    model.add(tokens <= caps[r]).only_enforce_if(chosen)
                    load = sum(x * t for x, t in zip(inside, times[r], strict=True))
                    model.add(size >= load + overhead * used).only_enforce_if(chosen)
                    model.add_hint(chosen, r == min(x for x in LEVELS if x >= recompute))
                for j, x in enumerate(inside):
                    model.add_implication(x, used)
                    holds[j].append(x)
                    model.add_hint(x, j in samples)
                model.add_hint(used, bool(samples))
                model.add(end <= makespan)
                if before is not None:  # packs of a window are alike
                    model.add_implication(used, before)
                before = used
                for rank in range(first, first + degree):
                    on_rank[rank].append(interval)
    for choices in holds:
        model.add_exactly_one(choices)
    for intervals in on_rank:
        model.add_no_overlap(intervals)
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = workers
    status = solver.solve(model)
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    best = min(horizon, round(solver.objective_value)) if found else horizon
    return Found(
        dcp_us=horizon, best_us=best, bound_us=plan.lower_bound_us,
        optimal=status == cp_model.OPTIMAL,
    )  # fmt: skip


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="per instance")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args(argv)
    print("| lengths, samples, seed | dcp ms | best found ms | proven | bound ms | dcp / best |")
    print("|---|---|---|---|---|---|")
    ratios = []
    begin = time.perf_counter()
    for name, samples, seed in CASES:
        f = best_found(request_of(name, samples, seed), args.seconds, args.workers)
        ratios.append(f.ratio)
        print(f"| {name} {samples} {seed} | {f.dcp_us / 1e3:.1f} | {f.best_us / 1e3:.1f} "
              f"| {'yes' if f.optimal else 'no'} | {f.bound_us / 1e3:.1f} | {f.ratio:.4f} |",
              flush=True)  # fmt: skip
    print(f"\nmean {np.mean(ratios):.4f} (bar 1.01), largest {max(ratios):.4f} (bar 1.05), "
          f"{time.perf_counter() - begin:.0f} s")  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
