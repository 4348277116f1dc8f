"""The planner's invariants and its Python oracle: the same bytes, for any workload."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_dcp.cost import CostProfile, resolve
from megatron_dcp.cost.derive import profile
from megatron_dcp.cost.profile import Overhead
from megatron_dcp.data.generators import generate
from megatron_dcp.errors import PlanError
from megatron_dcp.plan import StepPlan, Topology, Workload, canonical_bytes, diff
from megatron_dcp.planner import PlanRequest, make_plan
from megatron_dcp.planner.oracle import oracle_bound_us, oracle_plan
from megatron_dcp.planner.oversize import most_bytes_needed

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "planner"))
from workloads import random_request

FEW = settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
CAP = 6400  # tokens per rank of a100-gpt7b without recompute; 51,200 with all of it


def same_bytes(request: PlanRequest) -> StepPlan:
    """make_plan checks every invariant of DESIGN.md; the oracle must then agree to the byte."""
    plan, oracle = make_plan(request), oracle_plan(request)
    assert canonical_bytes(plan) == canonical_bytes(oracle), diff(plan, oracle)
    assert plan.makespan_us >= plan.lower_bound_us
    return plan


def request_of(lengths: list[int], ranks: int, per_node: int, lockstep: int = 1) -> PlanRequest:
    return PlanRequest(
        workload=Workload(lengths=tuple(lengths)),
        topology=Topology(data_ranks=ranks, ranks_per_node=per_node),
        profile=resolve("a100-gpt7b"),
        lockstep=lockstep,
    )


CASES = {
    "one sample": ([1000], 8, 4),
    "one token": ([1], 8, 8),
    "all equal": ([700] * 33, 8, 8),
    "all at the cap": ([CAP] * 9, 8, 4),
    "one above the cap": ([CAP + 1] * 9, 8, 4),
    "one giant": ([400_000, *range(1, 200, 7)], 16, 8),
    "fewer samples than ranks": ([9000, 30_000, 12, 400, 2500], 16, 4),
    "the longest that fits": ([51_200 * 8, 5], 8, 8),
    "nodes of three": ([9000, 8000, 7000, 100, 100, 100, 40_000], 9, 3),
    "one rank": ([1, 5000, 20_000, 7], 1, 1),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("domain", ["async", "node", "all"])
def test_named_cases(case: str, domain: str) -> None:
    lengths, ranks, per_node = CASES[case]
    lockstep = {"async": 1, "node": per_node, "all": ranks}[domain]
    same_bytes(request_of(lengths, ranks, per_node, lockstep))


@FEW
@given(
    lengths=st.lists(st.integers(1, 60_000) | st.integers(1, 900), min_size=1, max_size=40),
    nodes=st.sampled_from([1, 2, 3]),
    per_node=st.sampled_from([1, 2, 4, 6]),
    lockstep=st.sampled_from(["1", "node", "all"]),
)
def test_any_lengths(lengths: list[int], nodes: int, per_node: int, lockstep: str) -> None:
    ranks = nodes * per_node
    domain = {"1": 1, "node": per_node, "all": ranks}[lockstep]
    request = request_of(lengths, ranks, per_node, domain)
    if max(lengths) > 51_200 * ranks:
        with pytest.raises(PlanError, match="fits_memory"):
            make_plan(request)
        return
    same_bytes(request)


@pytest.mark.parametrize("seed", range(60))
def test_random_profiles_topologies_and_budgets(seed: int) -> None:
    request = random_request(seed, most_ranks=24, most_samples=60)
    longest = max(request.workload.lengths)
    least = most_bytes_needed(request.cost, longest, recompute=request.recompute)
    if least > request.budget_bytes:
        for planner in (make_plan, oracle_plan):
            with pytest.raises(PlanError, match="fits_memory"):
                planner(request)
        return
    plan = same_bytes(request)
    assert oracle_bound_us(request) == plan.lower_bound_us


@pytest.mark.parametrize("seed", range(100, 140))
def test_never_slower_than_static(seed: int) -> None:
    request = random_request(seed, most_ranks=32, most_samples=80)
    try:
        static = make_plan(request, "static")
    except PlanError:
        pytest.skip("the longest sample of this case fits no static degree")
    plan = make_plan(request)
    assert plan.lower_bound_us <= plan.makespan_us <= static.makespan_us


def test_a_sample_that_cannot_fit_is_named() -> None:
    with pytest.raises(PlanError) as caught:
        make_plan(request_of([5, 51_200 * 8 + 1], 8, 8))
    text = str(caught.value)
    assert "sample 1 of 409601 tokens" in text
    assert "28672070000 bytes" in text  # 409,601 / 8 tokens of 560,000 bytes
    assert "28672000000" in text


def test_a_model_of_many_bytes_a_token_keeps_its_budget() -> None:
    """2^40 tokens of gpt-30b are more bytes than 64 bits hold."""
    topology = Topology(data_ranks=8, ranks_per_node=8)
    workload, heavy = (
        Workload(lengths=(9000,) * 12),
        profile("h200", "gpt-30b", topology, lockstep=8),
    )
    same_bytes(PlanRequest(workload=workload, topology=topology, profile=heavy, lockstep=8))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("length", [1600, 3200, 6400])
@pytest.mark.parametrize("longer", [[], [9000], [30_000, 12_000]])
def test_packs_are_merged_as_long_as_that_is_faster(
    longer: list[int], length: int, ranks: int
) -> None:
    """Where a microbatch costs much, recomputed packs are worth merging further."""
    costly = replace(resolve("a100-gpt7b"), overhead_us=Overhead(async_=629e3, lockstep=629e3))
    for samples in (4, 8, 16, 24):
        request = request_of([*longer, *[length] * samples], ranks, ranks)
        same_bytes(replace(request, profile=costly))


def without_links(*degrees: int) -> CostProfile:
    """The largest time per byte that a profile may state, for these rows of its links."""
    p = resolve("a100-gpt7b")
    rows = [replace(x, us_per_byte=1e15) if x.max_degree in degrees else x for x in p.links]
    return replace(p, links=tuple(rows))


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("lockstep", [1, 8])
def test_a_link_that_is_no_link_is_not_used(stages: int, lockstep: int) -> None:
    request = replace(
        request_of([120_000, 90_000, 70_000, 3000, 200, 60], 8, 8, lockstep),
        topology=Topology(data_ranks=8, ranks_per_node=8, pipeline_stages=stages),
        profile=without_links(2, 4),
    )
    assert {p.degree for p in same_bytes(request).placements} <= {1, 5, 6, 7, 8}


def test_a_step_that_never_ends_is_refused() -> None:
    with pytest.raises(PlanError, match="no plan can hold"):
        make_plan(replace(request_of([60_000, 100], 8, 8), profile=without_links(2, 4, 8)))


def test_headline_lengths() -> None:
    path = Path(__file__).parents[1] / "data" / "lengths" / "wiki_512.txt"
    request = request_of([int(x) for x in path.read_text().split()], 64, 8)
    plan = same_bytes(request)
    assert plan.makespan_us <= 1_600_000


def long_tailed(samples: int, ranks: int, seed: int) -> PlanRequest:
    """Documents up to 2M tokens, one of which decides the step."""
    topology = Topology(data_ranks=ranks, ranks_per_node=8)
    drawn = generate("byted-like", samples, seed).lengths
    return PlanRequest(
        workload=Workload(lengths=tuple(int(n) for n in drawn)),
        topology=topology,
        profile=profile("h100", "gpt-7b", topology),
    )


def test_a_large_batch_far_from_its_bound_gets_the_whole_portfolio() -> None:
    same_bytes(long_tailed(2049, 256, 29))


def test_a_sample_that_outweighs_the_others_gets_no_more_ranks_than_help() -> None:
    """One target a little above the bound needs 512 ranks for the longest sample, not 976."""
    plan = make_plan(long_tailed(4096, 1024, 2))
    assert plan.makespan_us <= 1.06 * plan.lower_bound_us
