"""The static settings that trainers are compared with, as plans."""

from collections import Counter

import pytest

from megatron_dcp.cli.bench_end_to_end.static_settings import check_strategy, plan_fn_of
from megatron_dcp.cost import resolve
from megatron_dcp.dist import DataWorld
from megatron_dcp.errors import ConfigError, PlanError
from megatron_dcp.plan import Topology, Workload
from megatron_dcp.planner import PlanRequest

LENGTHS = (6000, 900, 800, 700, 100, 90, 80, 70, 60, 50)


def plan(strategy, ranks=2, lengths=LENGTHS):
    request = PlanRequest(
        workload=Workload(lengths=lengths), profile=resolve("a100-gpt7b"),
        topology=Topology(data_ranks=ranks, ranks_per_node=ranks),
    )  # fmt: skip
    return plan_fn_of(DataWorld(), strategy)(request)


def test_static_cp_runs_one_sample_per_microbatch():
    made = plan("cp:2", ranks=4)
    assert {p.degree for p in made.placements} == {2}
    assert [p.samples for p in made.placements if p.first_rank == 0] == [
        (0,),
        (2,),
        (4,),
        (6,),
        (8,),
    ]
    assert made.placements[0].recompute == 0


def test_equal_counts_are_equal_on_all_ranks():
    made = plan("kk:1@all", ranks=4)
    assert made.lockstep == 4
    assert {p.degree for p in made.placements} == {1}
    slots = Counter(p.slot for p in made.placements)
    assert len(slots) == made.placements[-1].slot + 1
    assert plan("kk", ranks=4).lockstep == 1


def test_trl_packs_are_trls_own():
    pytest.importorskip("trl")
    made = plan("trl-packing:1")
    packs = sorted(sum(LENGTHS[i] for i in p.samples) for p in made.placements)
    # best fit decreasing to 6000 tokens: the longest alone, the rest together
    assert packs == [2850, 6000]
    assert {p.first_rank for p in made.placements} == {0, 1}


@pytest.mark.parametrize(("strategy", "text"), [("kk@some", "only '@all'"), ("magic@all", "magic")])
def test_unknown_names_are_refused(strategy, text):
    with pytest.raises(ConfigError, match=text):
        check_strategy(strategy)


def test_a_degree_is_needed_and_must_hold_the_longest_sample():
    check_strategy("kk@all")
    with pytest.raises(ConfigError, match="needs a degree"):
        plan("cp")
    with pytest.raises(PlanError, match="sample 0"):
        plan("cp:1", lengths=(300_000, 5))
