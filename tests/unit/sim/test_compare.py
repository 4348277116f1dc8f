"""Totals over steps: speedups pair the same steps, shares add up, groups and shapes are counted."""

import dataclasses

import pytest

from megatron_dcp.plan import Topology
from megatron_dcp.plan.groups import communicators
from megatron_dcp.sim import ReplayOptions, replay
from megatron_dcp.sim.compare import (
    Tally,
    padded_tokens,
    speedup,
    speedup_by_seed,
    to_object,
)

EIGHT = Topology(data_ranks=8, ranks_per_node=4)


def filled(plans, name, seeds, steps=2, profile=None):
    p = profile or plans.profile()
    tally = Tally(name=name)
    for seed in seeds:
        for step in range(steps):
            plan = dataclasses.replace(plans.random(p, EIGHT, 10 * seed + step), step=step)
            tally.add((seed, step), plan, replay(plan, p))
    return tally


def test_speedup_pairs_the_steps_that_both_have(plans):
    slow = filled(plans, "slow", [0, 1, 2])
    fast = Tally(name="fast")
    fast.step_us = {k: v / 2 for k, v in slow.step_us.items() if k[0] != 1}
    assert speedup(fast, slow) == pytest.approx(2.0)
    assert speedup_by_seed(fast, slow) == pytest.approx([2.0, 2.0])
    assert speedup(fast, None) is None
    assert speedup(fast, Tally(name="none")) is None


def test_object_has_exactly_the_documented_keys(plans):
    tallies = {"bucket": filled(plans, "bucket", [0]), "dcp": filled(plans, "dcp", [0])}
    tallies["bad"] = Tally(name="bad", failed="sample 3 does not fit")
    obj = to_object(tallies, 8)
    assert obj["schema"] == "mdcp.simulate/1"
    assert obj["ranks"] == 8
    assert set(obj["strategies"]) == {"bucket", "dcp"}
    row = obj["strategies"]["dcp"]
    assert set(row) == {
        "step_ms", "speedup_vs", "idle", "comm", "recompute", "padding", "planner_ms"
    }  # fmt: skip
    assert row["speedup_vs"] == {"bucket": 1.0, "packed": None, "static": None}
    assert obj["failed"] == {"bad": "sample 3 does not fit"}
    shares = [v for k, v in obj["details"]["dcp"].items() if k.startswith("share_")]
    assert sum(shares) == pytest.approx(1.0)


def test_communicators_of_hybrid_blocks_are_its_inner_and_outer_groups(plans):
    p = plans.profile()
    rows = [(0, 0, 8, "hybrid", 4, 0, [0]), (1, 0, 2, "ulysses", 2, 0, [1]),
            (1, 2, 1, "local", 1, 0, [2])]  # fmt: skip
    plan = plans.build(p, EIGHT, [801, 100, 7], rows)
    assert communicators(plan) == {
        (0, 4), (4, 4), (0, 2, 4), (1, 2, 4), (2, 2, 4), (3, 2, 4), (0, 2)
    }  # fmt: skip
    assert padded_tokens(plan) == 7  # 801 tokens on 8 ranks


def test_reduction_is_part_of_the_step(plans):
    p = plans.profile()
    plan = plans.random(p, EIGHT, 1)
    r = replay(plan, p, ReplayOptions(parameters=10**7))
    tally = Tally(name="x")
    tally.add((0, 0), plan, r)
    assert tally.share("reduction") == pytest.approx(r.reduction_us / r.step_us)
    assert tally.step_ms[0] == pytest.approx(r.step_us / 1e3)
