"""Pipeline stages: makespan = sum of a rank + (p - 1) times the largest placement of the step."""

from __future__ import annotations

import pytest

from megatron_dcp.cost import resolve
from megatron_dcp.plan import StepPlan, Topology, Workload
from megatron_dcp.planner import PlanRequest, make_plan


def plan_of(lengths: list[int], stages: int, ranks: int = 8) -> StepPlan:
    topology = Topology(data_ranks=ranks, ranks_per_node=8, pipeline_stages=stages)
    return make_plan(
        PlanRequest(
            workload=Workload(lengths=tuple(lengths)),
            topology=topology,
            profile=resolve("a100-gpt7b"),
        )
    )


def by_hand(lengths: list[int], stages: int, packs: int) -> float:
    """us of one rank with its samples in equal packs: 0.1839576 ms a token, 5.128e-6 a pair."""
    ms = sum(5.128e-6 * n * n + 0.1839576 * n for n in lengths) / stages
    return 1000.0 * (ms + packs * 20.0 + (stages - 1) * (ms / packs + 20.0))


def test_packs_are_cut_while_the_pipeline_gains() -> None:
    # Every rank runs 8 samples of 100 tokens, which fit one pack even with 4 packs in flight.
    plan = plan_of([100] * 64, stages=4)
    best = min(range(1, 9), key=lambda k: by_hand([100] * 8, 4, k))
    assert best > 1
    counts = [sum(p.first_rank == r for p in plan.placements) for r in range(8)]
    assert counts == [best] * 8
    assert plan.makespan_us == pytest.approx(by_hand([100] * 8, 4, best), rel=1e-4)


def test_without_stages_packs_stay_whole() -> None:
    plan = plan_of([100] * 64, stages=1)
    assert [len(p.samples) for p in plan.placements] == [8] * 8


def test_a_long_sample_is_not_cut() -> None:
    plan = plan_of([6000] + [50] * 7, stages=4)
    long = next(p for p in plan.placements if 0 in p.samples)
    assert plan.makespan_us >= plan.lower_bound_us
    assert long.time_us * 4 <= plan.makespan_us
