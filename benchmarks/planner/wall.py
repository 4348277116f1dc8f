"""The gap that one overhead per rank forces: a stronger bound than the published one, as a measure.

A rank that works pays at least one overhead o, so within a makespan T the work without overheads
must fit (T - o) on every rank. Prints how far the least such T is above the planner's lower bound.

    python benchmarks/planner/wall.py wiki 48/64 128/64
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from megatron_dcp.cost import resolve
from megatron_dcp.cost.profile import Overhead
from megatron_dcp.data.lengths import read_lengths
from megatron_dcp.plan import Topology, Workload
from megatron_dcp.planner import PlanRequest
from megatron_dcp.planner.core import lower_bound_us
from megatron_dcp.planner.oracle_table import Table

LENGTHS = Path(__file__).parents[2] / "tests" / "data" / "lengths"
SEEDS = 20


def wall_percent(request: PlanRequest) -> float:
    """Gap of the stronger bound, async, percent of the planner's own."""
    overhead = request.profile.overhead_us.async_
    free = replace(request.profile, overhead_us=Overhead(async_=0.0, lockstep=0.0))
    table, bound = Table(replace(request, profile=free)), lower_bound_us(request)

    def fits(makespan: float) -> bool:
        room = makespan - overhead
        options = [table.cheapest(j, room, True) for j in range(len(table.samples))]
        return all(o.degree for o in options) and sum(o.work for o in options) <= room * table.ranks

    low, high = 0.9 * bound, 2.0 * bound
    while high - low > bound / 10_000:
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return 100.0 * (max(high, bound) / bound - 1.0)


def main(name: str, sizes: list[str]) -> None:
    pool = np.asarray(read_lengths(LENGTHS / f"{name}_16384.txt"))
    for size in sizes:
        samples, ranks = (int(x) for x in size.split("/"))
        walls = []
        for seed in range(SEEDS):
            drawn = np.random.default_rng(seed).choice(pool, samples, replace=samples > len(pool))
            walls.append(wall_percent(PlanRequest(
                workload=Workload(lengths=tuple(int(x) for x in drawn)),
                topology=Topology(data_ranks=ranks, ranks_per_node=min(8, ranks)),
                profile=resolve("a100-gpt7b"),
            )))  # fmt: skip
        print(f"{name} {size}: mean {np.mean(walls):.2f} %, largest {max(walls):.2f} %")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
