"""What each rank runs: placements in plan order, dummies where a domain needs them."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from megatron_dcp.runtime.schedule import group_blocks, rank_schedule
from megatron_dcp.testing.plans import plan_request, random_plan


@given(
    seed=st.integers(0, 200),
    domain=st.sampled_from([1, 2, 4]),
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=12),
)
def test_lockstep_ranks_run_the_same_slots(seed: int, domain: int, lengths: list[int]) -> None:
    plan = random_plan(plan_request(lengths, 4, lockstep=domain), seed)
    schedules = [rank_schedule(plan, r) for r in range(4)]
    for rank, work in enumerate(schedules):
        slots = [w.placement.slot for w in work]
        assert slots == sorted(slots)
        assert [w.placement for w in work if not w.dummy] == plan.of_rank(rank)
        if domain == 1:
            assert not any(w.dummy for w in work)
            continue
        mates = range(rank // domain * domain, (rank // domain + 1) * domain)
        for mate in mates:
            assert [w.placement.slot for w in schedules[mate]] == slots
    seen = [i for work in schedules for w in work for i in w.placement.samples]
    assert set(seen) == set(range(len(lengths)))


def test_an_idle_rank_runs_a_dummy_where_the_wrapper_needs_one() -> None:
    plan = random_plan(plan_request([9, 9, 9], 2), 1, idle_rank=True)
    assert rank_schedule(plan, 1) == []
    (work,) = rank_schedule(plan, 1, min_microbatches=1)
    assert work.dummy
    assert (work.placement.first_rank, work.placement.degree) == (1, 1)
    assert rank_schedule(plan, 0, closing_dummy=True)[-1].closing


def test_dummies_recompute_as_their_slot_does() -> None:
    plan = random_plan(plan_request([9] * 9, 4, lockstep=4), 3)
    values = {p.slot: p.recompute for p in plan.placements}
    dummies = [w for r in range(4) for w in rank_schedule(plan, r) if w.dummy]
    assert dummies
    assert all(w.placement.recompute == values[w.placement.slot] for w in dummies)


def test_pipeline_ranks_run_every_slot() -> None:
    plan = random_plan(plan_request([9] * 7, 4), 3)
    topology = replace(plan.topology, pipeline_stages=2, virtual_stages=2)
    plan = replace(plan, topology=topology)
    count = plan.slots + plan.slots % 2
    for rank in range(4):
        work = rank_schedule(plan, rank)
        assert [w.placement.slot for w in work] == list(range(count))
        assert [w.placement for w in work if not w.dummy] == plan.of_rank(rank)


def test_groups_are_never_of_one_rank() -> None:
    for seed in range(30):
        plan = random_plan(plan_request([20] * 10, 8), seed)
        blocks = group_blocks(plan)
        assert len(set(blocks)) == len(blocks)
        assert all(n > 1 for _, n in blocks)
