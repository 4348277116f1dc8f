"""Replay against closed forms and against the plan's own makespan."""

import itertools
import time

import numpy as np
import pytest

from megatron_dcp.cost import resolve
from megatron_dcp.cost.derive import profile as preset
from megatron_dcp.cost.profile import Overhead, Overlap
from megatron_dcp.plan import Topology, Workload
from megatron_dcp.planner import PlanRequest, make_plan
from megatron_dcp.sim import Contention, Noise, ReplayOptions, replay

TWO = Topology(data_ranks=2, ranks_per_node=2)
EIGHT = Topology(data_ranks=8, ranks_per_node=4)
# Ulysses over 2 of 8 heads of 16 in bf16: 1/2 * T/2 * (2 * 8 + 2 * 8) * 16 * 2 bytes, twice
ULYSSES_BYTES_PER_TOKEN_LAYER = 0.5 * 0.5 * 32 * 16 * 2 * 2


def test_two_ranks_one_link_exactly(plans):
    """Rank 0 runs 100 tokens alone, then both share 200: every number by hand."""
    p = plans.profile()
    rows = [(0, 0, 1, "local", 1, 0, [0]), (1, 0, 2, "ulysses", 2, 0, [1])]
    plan = plans.build(p, TWO, [100, 200], rows)
    alone = 100 + 0.001 * 100**2 + 10
    compute = 200 / 2 + 0.001 * 200**2 / 2 + 10
    wire = ULYSSES_BYTES_PER_TOKEN_LAYER * 200 * 4 * 0.001 + 4 * 4 * 2.0
    r = replay(plan, p)
    assert wire == pytest.approx(441.6)
    assert r.makespan_us == round(alone + compute + wire)
    assert r.comm_inside == pytest.approx(2 * wire, rel=2e-3)
    assert r.comm_across == 0
    assert r.idle == round(alone)  # rank 1 waits for rank 0
    assert r.compute == pytest.approx(110 + 2 * 120, rel=2e-3)
    assert r.overhead == pytest.approx(3 * 10, rel=2e-3)


def test_overlap_hides_transfers_up_to_a_share_of_the_attention(plans):
    p = plans.profile(overlap=Overlap(ulysses=0.5))
    rows = [(0, 0, 2, "ulysses", 2, 0, [0])]
    short, long = (plans.build(p, TWO, [n], rows) for n in (400, 20_000))
    hidden = 0.5 * 0.001 * 400**2 / 2
    wire = ULYSSES_BYTES_PER_TOKEN_LAYER * 400 * 4 * 0.001 + 32
    assert replay(short, p).comm_inside == pytest.approx(2 * (wire - hidden), rel=1e-3)
    assert replay(long, p).comm_inside == 0


@pytest.mark.parametrize(("lockstep", "grid"), [(1, False), (8, False), (4, False), (1, True)])
def test_makespan_equals_the_plans_to_1_us(plans, lockstep, grid):
    changes = {"linear_half_tokens": 30, "attn_half_tokens": 40, "overlap": Overlap(ring=0.3)}
    if grid:
        changes |= {"pairs": "grid", "attn_spatial_us_per_pair": 0.002, "attn_us_per_pair": 0.0,
                        "attn_temporal_us_per_pair": 0.05}  # fmt: skip
    p = plans.profile(**changes)
    speeds = [None, (1000, 900, 1000, 1070, 1000, 950, 1000, 1000)]
    for seed, speed in itertools.product(range(40), speeds):
        topology = Topology(data_ranks=8, ranks_per_node=4, speed=speed)
        # domains smaller than all ranks couple through wide blocks only inside one slot
        plan = plans.random(p, topology, seed, lockstep=lockstep, grid=grid, full=lockstep == 4)
        assert abs(replay(plan, p).makespan_us - plan.makespan_us) <= 1


def test_rank_time_adds_up(plans):
    p = plans.profile()
    for seed, lockstep in itertools.product(range(5), (1, 8)):
        plan = plans.random(p, EIGHT, seed, lockstep=lockstep)
        for noise in (Noise(), Noise(slot=0.1, rank=0.05, seed=seed)):
            r = replay(plan, p, ReplayOptions(noise=noise))
            names = ("compute", "recompute", "comm", "overhead", "idle")
            assert sum(r.share(n) for n in names) == pytest.approx(1.0)
            assert r.idle >= -1e-6


def test_a_wrong_time_in_the_plan_is_found(plans):
    """The replay never reads the planner's times."""
    from dataclasses import replace

    p = plans.profile()
    plan = plans.random(p, EIGHT, 3)
    wrong = tuple(replace(x, time_us=x.time_us * 2) for x in plan.placements)
    assert replay(replace(plan, placements=wrong), p).makespan_us == plan.makespan_us


def test_a_shared_fabric_halves_the_rate_of_two_transfers(plans):
    """Two rings over two nodes each on a fabric for 2 senders: 4 senders share it."""
    p = plans.profile()
    topology = Topology(data_ranks=16, ranks_per_node=4)
    rows = [(0, 0, 8, "ring", 1, 0, [0]), (0, 8, 8, "ring", 1, 0, [1])]
    plan = plans.build(p, topology, [8000, 8000], rows)
    free = replay(plan, p)
    shared = replay(plan, p, ReplayOptions(contention=Contention(fabric_senders=2)))
    wide = replay(plan, p, ReplayOptions(contention=Contention(fabric_senders=4)))
    wire = free.comm_across / 16
    assert wide.makespan_us == pytest.approx(free.makespan_us, abs=1)
    assert shared.makespan_us == pytest.approx(free.makespan_us + wire, abs=2)
    assert shared.comm_across == pytest.approx(2 * free.comm_across, rel=1e-3)


def test_a_late_transfer_slows_an_earlier_one_only_while_both_run(plans):
    """A shared bus of one pair: equal tasks, the second starts later; hand-computed ends."""
    p = plans.profile(overhead_us=type(plans.profile().overhead_us)(async_=0.0, lockstep=0.0))
    topology = Topology(data_ranks=4, ranks_per_node=4)
    rows = [(0, 0, 2, "ulysses", 2, 0, [0]), (0, 2, 1, "local", 1, 0, [1]),
            (1, 2, 2, "ulysses", 2, 0, [2])]  # fmt: skip
    plan = plans.build(p, topology, [1000, 200, 1000], rows)
    c = 1000 / 2 + 0.001 * 1000**2 / 2
    w = ULYSSES_BYTES_PER_TOKEN_LAYER * 1000 * 4 * 0.001 + 32
    late = 200 + 0.001 * 200**2
    both = c + 2 * w  # duration while two transfers share the bus
    done = late / (c + w)  # of the first task when the second starts
    first_end = late + (1 - done) * both
    second_end = first_end + (1 - (first_end - late) / both) * (c + w)
    r = replay(plan, p, ReplayOptions(contention=Contention(node_senders=2), keep_spans=True))
    ends = {s.placement: s.end_us for s in r.spans}
    assert ends[0] == pytest.approx(first_end, abs=1)
    assert ends[2] == pytest.approx(second_end, abs=1)


def test_noise_is_seeded_and_slows_wide_blocks_more(plans):
    p = plans.profile()
    wide = plans.build(p, EIGHT, [4000], [(0, 0, 8, "ring", 1, 0, [0])])
    alone = plans.build(p, EIGHT, [500], [(0, 0, 1, "local", 1, 0, [0])])
    noise = [ReplayOptions(noise=Noise(slot=0.1, seed=s)) for s in range(50)]

    def mean(plan):
        base = replay(plan, p).makespan_us
        return sum(replay(plan, p, o).makespan_us / base for o in noise) / len(noise)

    assert replay(wide, p, noise[7]) is not None
    assert replay(wide, p, noise[7]).makespan_us == replay(wide, p, noise[7]).makespan_us
    assert mean(wide) > 1.08  # the slowest of 8
    assert mean(alone) == pytest.approx(1.0, abs=0.05)


def test_gradient_reduction_by_hand(plans):
    p = plans.profile()
    plan = plans.build(p, EIGHT, [100] * 8, [(0, r, 1, "local", 1, 0, [r]) for r in range(8)])
    options = ReplayOptions(parameters=1_000_000)
    # 6 bytes a weight, 7/8 of them sent, 0.01 us/byte over 4 ports; 2 * 3 messages of 5 us
    full = 6e6 * 7 / 8 * max(0.001, 0.01 / 4) + 2 * 3 * 5
    r = replay(plan, p, options)
    assert r.reduction_us == r.reduction_full_us == pytest.approx(full)
    assert r.step_us == r.makespan_us + r.reduction_us
    overlap = ReplayOptions(parameters=1_000_000, overlap_reduction=True)
    hidden = replay(plan, p, overlap).reduction_us
    assert full / 4 <= hidden < full
    zero3 = plans.build(
        p, EIGHT, [100] * 8, [(0, r, 1, "local", 1, 0, [r]) for r in range(8)], lockstep=8
    )
    assert replay(zero3, p, options).reduction_us == 0
    assert replay(zero3, p, options).gathers == pytest.approx(8 * 40, rel=0.01)


def test_uniform_1f1b_has_the_textbook_makespan(plans):
    """m equal microbatches over p stages: (m + p - 1) * t."""
    p = plans.profile(links=plans.profile().links)
    for stages, count in ((2, 3), (4, 4), (4, 7)):
        topology = Topology(data_ranks=2, ranks_per_node=2, pipeline_stages=stages)
        rows = [(s, r, 1, "local", 1, 0, [s * 2 + r]) for s in range(count) for r in range(2)]
        plan = plans.build(p, topology, [500] * (2 * count), rows)
        t = plan.placements[0].time_us
        assert replay(plan, p).makespan_us == pytest.approx((count + stages - 1) * t, rel=1e-9)
        assert plan.makespan_us == (count + stages - 1) * t


def test_interleaving_divides_the_bubble_by_the_chunks(plans):
    """m equal microbatches, v chunks: m t + (p - 1) t / v."""
    p = plans.profile(model=plans.profile().model)
    for v in (1, 2, 4):
        topology = Topology(data_ranks=1, ranks_per_node=1, pipeline_stages=2, virtual_stages=v)
        rows = [(s, 0, 1, "local", 1, 0, [s]) for s in range(8)]
        plan = plans.build(p, topology, [500] * 8, rows)
        t = plan.placements[0].time_us
        assert replay(plan, p).makespan_us == pytest.approx(8 * t + t / v, rel=1e-9)


def test_dummies_of_a_pipeline_take_their_time(plans):
    """Rank 1 has one microbatch of four: three dummies, which its stages run one after another."""
    p = plans.profile(overhead_us=Overhead(async_=1000.0, lockstep=1000.0))
    topology = Topology(data_ranks=2, ranks_per_node=2, pipeline_stages=2)
    rows = [(s, 0, 1, "local", 1, 0, [s]) for s in range(4)] + [(0, 1, 1, "local", 1, 0, [4])]
    plan = plans.build(p, topology, [500] * 5, rows)
    dummy = p.linear_us_per_token / 2 + 1000.0
    r = replay(plan, p)
    assert r.makespan_us == pytest.approx(plan.makespan_us, rel=1e-9)
    # A degree-2 placement after the dummies waits for them and for nothing else.
    rows = [(0, 0, 1, "local", 1, 0, [0]), (2, 0, 2, "ulysses", 2, 0, [1])]
    late = plans.build(p, topology, [1, 1], rows)
    assert late.microbatches == 3
    assert replay(late, p).makespan_us >= 3 * dummy


def test_uneven_pipeline_stays_near_the_plans_formula(plans):
    """sum + (p - 1) * max bounds what 1F1B does with unequal microbatches, within its own term."""
    p = plans.profile()
    topology = Topology(data_ranks=4, ranks_per_node=4, pipeline_stages=4)
    for seed in range(30):
        plan = plans.random(p, topology, seed, slots=8, full=True, lockstep=4)
        r = replay(plan, p)
        largest = max(x.time_us for x in plan.placements)
        assert r.makespan_us <= plan.makespan_us + 3 * largest
        assert r.makespan_us >= max(sum(x.time_us for x in plan.of_rank(rank)) for rank in range(4))


def test_presets_replay_to_the_plans_makespan(plans):
    topology = Topology(data_ranks=16, ranks_per_node=8)
    for name in ("dit-1.2b-2d", "gpt-7b"):
        p = preset("h200", name, topology)
        for seed in range(5):
            plan = plans.random(p, topology, seed, grid=True)
            assert abs(replay(plan, p).makespan_us - plan.makespan_us) <= 1


def test_ten_steps_of_4096_samples_on_1024_ranks_take_seconds():
    """Planned and replayed in under 10 s of this process's time."""
    topology = Topology(data_ranks=1024, ranks_per_node=8)
    profile = resolve("a100-gpt7b")
    rng = np.random.default_rng(3)
    begin = time.process_time()
    for step in range(10):
        lengths = np.minimum(rng.lognormal(6.5, 1.1, 4096).astype(int) + 1, 100_000)
        workload = Workload(lengths=tuple(int(n) for n in lengths))
        request = PlanRequest(workload=workload, topology=topology, profile=profile, step=step)
        plan = make_plan(request, "dcp")
        assert abs(replay(plan, profile).makespan_us - plan.makespan_us) <= 1
    assert time.process_time() - begin < 10
