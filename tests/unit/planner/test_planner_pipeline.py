"""Pipeline stages: makespan = sum of a rank + (p - 1) times the largest placement of the step.

Every rank runs the same number of microbatches, a multiple of the stages when they interleave: its
placements, and one dummy where it has none. Plans are chosen with their dummies and stated without.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from megatron_dcp.cost import resolve
from megatron_dcp.plan import StepPlan, Topology, Workload, canonical_bytes, diff
from megatron_dcp.plan.replay import makespan_us
from megatron_dcp.planner import PlanRequest, check_strategy, make_plan
from megatron_dcp.planner.oracle import oracle_plan


def request_of(lengths: list[int], stages: int, virtual: int = 1, lockstep: int = 1) -> PlanRequest:
    topology = Topology(
        data_ranks=8, ranks_per_node=8, pipeline_stages=stages, virtual_stages=virtual
    )
    return PlanRequest(
        workload=Workload(lengths=tuple(lengths)),
        topology=topology,
        profile=resolve("a100-gpt7b"),
        lockstep=lockstep,
    )


def test_a_strategy_may_be_checked_for_any_number_of_stages() -> None:
    check_strategy("static:4", Topology(data_ranks=8, ranks_per_node=8, pipeline_stages=3))


def plan_of(lengths: list[int], stages: int, virtual: int = 1) -> StepPlan:
    return make_plan(request_of(lengths, stages, virtual))


def counts_of(plan: StepPlan) -> list[int]:
    return [len(plan.of_rank(r)) for r in range(8)]


def by_hand(lengths: list[int], stages: int, packs: int) -> float:
    """us of one rank with its samples in equal packs: 0.1839576 ms a token, 5.128e-6 a pair."""
    ms = sum(5.128e-6 * n * n + 0.1839576 * n for n in lengths) / stages
    return 1000.0 * (ms + packs * 20.0 + (stages - 1) * (ms / packs + 20.0))


def test_packs_are_cut_while_the_pipeline_gains() -> None:
    # Every rank runs 8 samples of 100 tokens, which fit one pack even with 4 packs in flight.
    plan = plan_of([100] * 64, stages=4)
    best = min(range(1, 9), key=lambda k: by_hand([100] * 8, 4, k))
    assert best > 1
    assert counts_of(plan) == [best] * 8
    assert plan.makespan_us == pytest.approx(by_hand([100] * 8, 4, best), rel=1e-4)


def test_without_stages_packs_stay_whole() -> None:
    plan = plan_of([100] * 64, stages=1)
    assert [len(p.samples) for p in plan.placements] == [8] * 8


def test_a_long_sample_is_not_cut() -> None:
    plan = plan_of([6000] + [50] * 7, stages=4)
    long = next(p for p in plan.placements if 0 in p.samples)
    assert plan.makespan_us >= plan.lower_bound_us
    assert long.time_us * 4 <= plan.makespan_us


def test_a_dummy_is_one_token_on_one_rank_of_one_stage() -> None:
    dummy = request_of([100] * 3, stages=4).cost.dummy_us
    assert dummy == round(20_000 + (183.9576 + 5.128e-3) / 4)
    assert request_of([100] * 3, stages=1).cost.dummy_us == 0


def test_packs_are_cut_where_a_dummy_would_follow() -> None:
    plan = plan_of([100] * 60 + [3000, 3000, 3000], stages=2)
    for rank, count in enumerate(counts_of(plan)):
        packs = [p for p in plan.of_rank(rank) if p.degree == 1]
        # A rank is left with dummies only where its packs cannot be cut.
        assert count == plan.microbatches or all(len(p.samples) == 1 for p in packs)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("samples", [1, 5, 8, 24, 64])
def test_interleaving_runs_a_multiple_of_the_stages(stages: int, samples: int) -> None:
    plan = plan_of([100 + 7 * i for i in range(samples)], stages, virtual=2)
    assert plan.microbatches % stages == 0
    ends = [sum(p.time_us for p in plan.of_rank(rank)) for rank in range(8)]
    largest = max(p.time_us for p in plan.placements)
    if all(p.degree == 1 for p in plan.placements):
        assert plan.makespan_us == max(ends) + (stages - 1) * largest
    assert plan.makespan_us >= max(ends) + (stages - 1) * largest
    if samples == 64:  # every rank has enough samples to run no dummy
        assert counts_of(plan) == [plan.microbatches] * 8


@pytest.mark.parametrize("virtual", [1, 2])
@pytest.mark.parametrize("lockstep", [1, 4, 8])
@pytest.mark.parametrize("seed", range(4))
def test_the_oracle_fills_alike(seed: int, lockstep: int, virtual: int) -> None:
    rng = random.Random(seed)
    lengths = [int(rng.lognormvariate(6.5, 1.2)) + 1 for _ in range(rng.choice([3, 9, 30]))]
    request = request_of(lengths, rng.choice([2, 4]), virtual, lockstep)
    plan, oracle = make_plan(request), oracle_plan(request)
    assert canonical_bytes(plan) == canonical_bytes(oracle), diff(plan, oracle)
    assert plan.makespan_us >= plan.lower_bound_us
    assert plan.makespan_us <= make_plan(request, "static").makespan_us


@pytest.mark.parametrize("virtual", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_no_slower_than_in_lockstep(seed: int, virtual: int) -> None:
    """Shelves keep the largest placement low, and a pipeline need not wait between them."""
    rng = random.Random(seed)
    lengths = [
        min(200_000, int(rng.lognormvariate(7.5, 1.3)) + 1) for _ in range(rng.choice([9, 60]))
    ]
    free = request_of(lengths, 4, virtual)
    overhead = replace(free.profile.overhead_us, lockstep=free.profile.overhead_us.async_)
    profile = replace(free.profile, overhead_us=overhead)
    locked = replace(free, lockstep=8, profile=profile)
    dummy = free.cost.dummy_us
    assert makespan_us(make_plan(free), dummy) <= makespan_us(make_plan(locked), dummy)
