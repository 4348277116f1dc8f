"""Each invariant has a test of its name: a plan that breaks it is refused with the witness."""

from dataclasses import replace

import pytest

from megatron_dcp.errors import ConfigError, PlanError
from megatron_dcp.plan import (
    CostRef,
    HeadLimits,
    Placement,
    StepPlan,
    Topology,
    Workload,
    check_plan,
    makespan_us,
)  # fmt: skip
from megatron_dcp.plan.check import check_runnable


def place(slot, first, degree, samples, **more):
    scheme = "local" if degree == 1 else "ulysses"
    return Placement(**{"slot": slot, "first_rank": first, "degree": degree, "samples": samples,
                        "scheme": scheme, "inner_degree": degree, "time_us": 10, "bytes": 1,
                        **more})  # fmt: skip


def plan_of(*placements, ranks=8, node=4, lockstep=1, samples=4, budget=100, layers=2):
    plan = StepPlan(
        strategy="test",
        algorithm="hand",
        topology=Topology(data_ranks=ranks, ranks_per_node=node),
        lockstep=lockstep,
        cost=CostRef(name="unit", digest="0" * 16),
        budget_bytes=budget,
        layers=layers,
        workload=Workload(lengths=(10,) * samples),
        placements=placements,
        makespan_us=0,
        lower_bound_us=1,
    )
    inside = all(0 <= p.first_rank <= ranks - p.degree for p in placements)
    return replace(plan, makespan_us=makespan_us(plan) if inside else 0)


GOOD = (place(0, 0, 4, (0,)), place(0, 4, 2, (1, 2)), place(1, 1, 1, (3,)))


def refused(invariant, *placements, heads=None, **kwargs):
    with pytest.raises(PlanError) as caught:
        check_plan(plan_of(*placements, **kwargs), heads)
    assert caught.value.invariant == invariant
    return caught.value


def test_a_good_plan_passes():
    check_plan(plan_of(*GOOD), HeadLimits(heads=8, kv_heads=2))


def test_covers_every_sample_once():
    assert refused("covers_every_sample_once", *GOOD[:2]).witness == 3
    assert refused("covers_every_sample_once", *GOOD, place(2, 7, 1, (0,))).witness == 0
    assert refused("covers_every_sample_once", *GOOD, place(2, 7, 1, (9,))).witness == 9
    refused("covers_every_sample_once", *GOOD, place(2, 7, 1, ()))


def test_blocks_are_disjoint_within_a_slot():
    error = refused("blocks_are_disjoint_within_a_slot", place(0, 0, 4, (0,)),
                    place(0, 3, 1, (1, 2, 3)))  # fmt: skip
    assert "rank 3" in str(error)


def test_fused_blocks_may_nest_but_not_overlap_by_half():
    check_plan(plan_of(place(0, 0, 4, (0, 1, 2), fused=True), place(0, 3, 1, (3,), fused=True)))
    refused("blocks_are_disjoint_within_a_slot", place(0, 0, 3, (0, 1, 2), fused=True),
            place(0, 2, 2, (3,), fused=True))  # fmt: skip


def test_fits_memory():
    assert "101 bytes" in str(refused("fits_memory", place(0, 0, 1, (0, 1, 2, 3), bytes=101)))
    refused("fits_memory", place(0, 0, 1, (0, 1, 2, 3), recompute=3))


@pytest.mark.parametrize(
    ("first", "degree", "scheme", "inner"),
    [
        (2, 4, "ulysses", 4),  # straddles two nodes
        (0, 6, "ring", 1),  # neither in a node nor whole nodes
        (0, 8, "ulysses", 8),  # all-to-all across nodes
        (0, 2, "local", 1),
        (0, 1, "ring", 1),
        (0, 4, "ulysses", 2),
        (0, 8, "hybrid", 8),
        (0, 8, "hybrid", 1),
        (0, 8, "hybrid", 0),
        (0, 4, "ring", 4),
        (6, 4, "ring", 1),  # runs past the last rank
        (0, 4, "magic", 1),
    ],
)
def test_respects_degree_limits(first, degree, scheme, inner):
    bad = place(0, first, degree, (0, 1, 2, 3), scheme=scheme, inner_degree=inner)
    refused("respects_degree_limits", bad)


def test_respects_degree_limits_of_the_heads():
    three = place(0, 0, 3, (0, 1, 2, 3))
    refused("respects_degree_limits", three, heads=HeadLimits(heads=8, kv_heads=2))
    check_plan(plan_of(three), HeadLimits(heads=6, kv_heads=3))
    check_plan(plan_of(three), HeadLimits(heads=8, kv_heads=2, free=True))


def test_order_has_no_cyclic_wait():
    refused("order_has_no_cyclic_wait", place(-1, 0, 1, (0, 1, 2, 3)))


def test_lockstep_slots_match():
    refused("lockstep_slots_match", place(0, 0, 1, (0, 1)), place(2, 0, 1, (2, 3)), lockstep=8)
    refused("lockstep_slots_match", *GOOD, lockstep=3)
    far = refused("lockstep_slots_match", *GOOD[:2], place(2**60, 1, 1, (3,)), lockstep=8)
    assert far.witness == (0, 1)
    check_plan(plan_of(*GOOD, lockstep=8))


def test_recompute_scope_respected():
    pair = (place(0, 0, 1, (0, 1), recompute=1), place(0, 1, 1, (2, 3)))
    refused("recompute_scope_respected", *pair, lockstep=8)
    check_plan(plan_of(*pair, lockstep=4))


def test_makespan_is_the_replay():
    with pytest.raises(PlanError, match="makespan_is_the_replay"):
        check_plan(replace(plan_of(*GOOD), makespan_us=19))


def test_replay_takes_time_linear_in_placements(monkeypatch):
    plan = plan_of(*(place(k, 0, 1, (k,)) for k in range(50)), samples=50)
    asked = []
    slots = StepPlan.slots.fget
    monkeypatch.setattr(StepPlan, "slots", property(lambda p: asked.append(p) or slots(p)))
    assert makespan_us(plan) == 500
    assert len(asked) == 1  # a search over all placements


def test_async_replay_waits_only_for_the_block():
    plan = plan_of(place(0, 0, 1, (0,), time_us=50), place(0, 1, 1, (1,), time_us=10),
                   place(1, 1, 1, (2,), time_us=10), place(1, 4, 2, (3,), time_us=30))  # fmt: skip
    assert makespan_us(plan) == 50
    wide = plan_of(place(0, 0, 1, (0,), time_us=50), place(0, 1, 1, (1,), time_us=10),
                   place(1, 0, 2, (2, 3), time_us=7))  # fmt: skip
    assert makespan_us(wide) == 57


def test_lockstep_replay_is_the_sum_of_slot_maxima():
    plan = plan_of(place(0, 0, 1, (0,), time_us=50), place(1, 1, 1, (1,), time_us=10),
                   place(1, 4, 2, (2, 3), time_us=30), lockstep=8)  # fmt: skip
    assert makespan_us(plan) == 80


def test_pipeline_adds_the_largest_placement():
    plan = plan_of(*GOOD)
    staged = replace(plan, topology=replace(plan.topology, pipeline_stages=4))
    assert makespan_us(staged) == makespan_us(plan) + 3 * 10


def test_pipeline_ranks_run_dummies_in_their_holes():
    """Rank 1 runs a placement, a dummy, a placement, a dummy; rank 4 one placement, 3 dummies."""
    plan = plan_of(place(0, 0, 4, (0,)), place(0, 4, 2, (1, 2)), place(2, 1, 1, (3,)), samples=4)
    staged = replace(
        plan,
        topology=replace(plan.topology, pipeline_stages=4, virtual_stages=2),
    )
    assert staged.microbatches == 4
    assert makespan_us(staged) == 10 + 10 + 3 * 10, "a plan's makespan leaves dummies out"
    assert makespan_us(staged, dummy_us=7) == 10 + 7 + 10 + 7 + 3 * 10
    last = replace(staged.placements[2], first_rank=4, degree=4)
    late = replace(staged, placements=(*staged.placements[:2], last))
    # Ranks 6 and 7 reach slot 2 after two dummies (14 us), ranks 4 and 5 after 10 + 7 us.
    assert makespan_us(late, dummy_us=7) == 17 + 10 + 7 + 3 * 10
    plain = replace(staged, topology=replace(staged.topology, virtual_stages=1))
    assert makespan_us(plain, dummy_us=7) == max(10 + 2 * 7, 10 + 7 + 10) + 3 * 10


def test_lockstep_pipelines_wait_for_dummies_too():
    plan = plan_of(place(0, 0, 1, (0,), time_us=3), place(1, 4, 1, (1,), time_us=10), lockstep=4)
    staged = replace(plan, topology=replace(plan.topology, pipeline_stages=2))
    # Domain 1 leaves slot 0, dummies only, after 7 us; domain 0 as well, its placement being 3.
    assert makespan_us(staged, dummy_us=7) == 7 + 10 + 10


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"data_ranks": 4, "ranks_per_node": 8}, "larger than data_ranks"),
        ({"data_ranks": 12, "ranks_per_node": 8}, "whole nodes"),
        ({"data_ranks": 0, "ranks_per_node": 1}, "data_ranks"),
        ({"data_ranks": 2, "ranks_per_node": 2, "speed": (1000,)}, "speed"),
        ({"data_ranks": 2, "ranks_per_node": 2, "speed": (1000, 10**12)}, "speed"),
        ({"data_ranks": 2, "ranks_per_node": 2, "speed": (1000, True)}, "speed"),
        ({"data_ranks": 2**40, "ranks_per_node": 2**40}, "data_ranks"),
        ({"data_ranks": 2, "ranks_per_node": 2, "virtual_stages": 2}, "pipeline_stages is 1"),
    ],
)
def test_topology_says_what_is_wrong(kwargs, text):
    with pytest.raises(ConfigError, match=text):
        Topology(**kwargs)


@pytest.mark.parametrize("bad", [0, -3, 2.5, True, "7", 2**31])
def test_lengths_are_positive_integers(bad):
    with pytest.raises(ConfigError, match="sample 1"):
        Workload(lengths=(4, bad))


def test_a_runtime_takes_plans_with_times_of_their_own():
    check_runnable(replace(plan_of(*GOOD), makespan_us=7, budget_bytes=0))


@pytest.mark.parametrize(
    ("message", "placements", "more"),
    [
        ("sample 3 is placed 0 times", GOOD[:2], {}),
        ("rank 1 is in placement", (place(0, 0, 2, (0, 1)), place(0, 1, 1, (2, 3))), {}),
        ("heads", (place(0, 0, 3, (0, 1, 2, 3)),), {"node": 3, "ranks": 3}),
        ("do not tile", GOOD, {"lockstep": 3}),
    ],
)
def test_a_runtime_refuses_what_it_cannot_run(message, placements, more):
    with pytest.raises(PlanError, match=message):
        check_runnable(plan_of(*placements, **more), HeadLimits(heads=8, kv_heads=2))


def test_a_runtime_refuses_fused_groups_by_name():
    plan = plan_of(place(0, 0, 4, (0, 1, 2), fused=True), place(0, 3, 1, (3,), fused=True))
    check_plan(plan)
    with pytest.raises(PlanError, match=r"slot 0, ranks 0..3\) is `fused`.*forward of its own"):
        check_runnable(plan)
