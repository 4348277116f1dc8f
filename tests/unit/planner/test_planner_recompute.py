"""Recompute is a knapsack per placement: bytes fall and time rises with every layer recomputed.

The frontier (bytes, time) over r = 0..L is monotone, so its optimum is the least r that fits; here
it is found by trying every scheme and every r.
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_dcp.cost import Mode, resolve
from megatron_dcp.cost.model import pack_of
from megatron_dcp.errors import PlanError
from megatron_dcp.plan import Placement, Topology, Workload
from megatron_dcp.planner import PlanRequest, make_plan
from megatron_dcp.planner.oversize import most_bytes_needed

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "planner"))
from workloads import random_request


def choices(request: PlanRequest, p: Placement) -> list[tuple[int, Mode, int]]:
    """(time, mode, r) of every way to run the placement's samples on its block that fits."""
    cost, pack = request.cost, pack_of(request.profile, request.workload, p.samples)
    speed = request.topology.block_speed(p.first_rank, p.degree)
    return [
        (cost.time_us(pack, p.degree, mode, r, speed), mode, r)
        for mode in cost.modes(p.degree)
        for r in range(cost.layers + 1 if request.recompute else 1)
        if cost.bytes(pack, p.degree, mode, r) <= request.budget_bytes
    ]


@pytest.mark.parametrize("seed", range(40))
def test_every_placement_is_the_optimum_of_its_frontier(seed: int) -> None:
    request = replace(random_request(seed, most_ranks=16, most_samples=40), lockstep=1)
    longest = max(request.workload.lengths)
    if most_bytes_needed(request.cost, longest, recompute=request.recompute) > request.budget_bytes:
        with pytest.raises(PlanError, match="fits_memory"):
            make_plan(request)
        return
    plan = make_plan(request)
    for p in plan.placements:
        found = choices(request, p)
        nominal = replace(request, topology=replace(request.topology, speed=None))
        assert p.time_us <= min(t for t, _, _ in found) + (request.topology.speed is not None)
        mode = Mode(p.scheme, p.inner_degree)
        assert p.recompute == min(r for _, m, r in found if m == mode)
        assert min(t for t, _, _ in choices(nominal, p)) == min(
            t for t, m, r in choices(nominal, p) if (m, r) == (mode, p.recompute)
        )


@pytest.mark.parametrize("seed", range(20))
def test_a_lockstep_slot_recomputes_the_least_with_which_all_its_blocks_fit(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [int(rng.lognormvariate(8.0, 1.2)) + 1 for _ in range(rng.randint(8, 60))]
    topology = Topology(data_ranks=8, ranks_per_node=rng.choice([4, 8]))
    request = PlanRequest(
        workload=Workload(lengths=tuple(min(n, 400_000) for n in lengths)),
        topology=topology,
        profile=resolve("a100-gpt7b"),
        lockstep=8,
    )
    plan = make_plan(request)
    for slot in range(plan.slots):
        here = [p for p in plan.placements if p.slot == slot]
        least = [min(r for _, _, r in choices(request, p)) for p in here]
        assert {p.recompute for p in here} == {max(least)}
