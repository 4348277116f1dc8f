"""The profile fit on made measurements whose truth is known."""

import json
import random

import pytest

from megatron_dcp.cost import CostModel, CostProfile, Link, Mode, ModelShape, dumps, from_object
from megatron_dcp.cost.cases import Case, Point, grid, point_from_object, ruled_out
from megatron_dcp.cost.model import Pack, sample_pack
from megatron_dcp.cost.profile import Overhead, RecomputeFraction
from megatron_dcp.cost.profiling import check_fingerprint, fit_profile
from megatron_dcp.errors import ConfigError
from megatron_dcp.plan import Topology

SHAPE = ModelShape(
    layers=4, heads=4, kv_heads=2, head_dim=32, hidden=128, vocab=256, element_bytes=4
)
HEAD_US, ONCE_US = 8.0, 700.0


def truth(depth):
    """The machine: per layer 60 us/token.. of a model of `depth` layers."""
    return CostProfile(
        name="truth",
        model=ModelShape(layers=depth, heads=4, kv_heads=2, head_dim=32, hidden=128, vocab=256,
                         element_bytes=4),
        linear_us_per_token=15.0 * depth + HEAD_US,
        attn_us_per_pair=0.012 * depth,
        recompute_fraction=RecomputeFraction(linear=0.3, attention=0.25, comm=0.5),
        overhead_us=Overhead(async_=300.0 * depth + ONCE_US),
        links=(Link(max_degree=2, us_per_byte=0.004, latency_us=60.0),),
        kept_bytes_per_token_layer=8000, checkpoint_bytes_per_token_layer=512,
        working_bytes_per_token=12000, static_bytes=5_000_000,
    )  # fmt: skip


def measure(case, noise):
    p = truth(case.depth)
    cost = CostModel(p, Topology(data_ranks=2, ranks_per_node=2))
    pack = Pack()
    for n in case.lengths:
        pack = pack + sample_pack(p, n)
    time = cost.time_us(pack, case.degree, case.mode, case.recompute)
    peak = cost.bytes(pack, case.degree, case.mode, case.recompute)
    return Point(case=case, time_us=time * noise.gauss(1, 0.03), peak_bytes=peak)


CASES = grid(4, 2048, {2: [Mode("ulysses", 2)]})


def test_the_truth_is_found_again_under_3_percent_noise():
    noise = random.Random(3)
    fitted = fit_profile([measure(c, noise) for c in CASES], SHAPE, name="fitted")
    p, t = fitted.profile, truth(4)
    assert p.linear_us_per_token == pytest.approx(t.linear_us_per_token, rel=0.08)
    assert p.attn_us_per_pair == pytest.approx(t.attn_us_per_pair, rel=0.08)
    assert p.kept_bytes_per_token_layer == pytest.approx(8000, rel=0.02)
    assert p.checkpoint_bytes_per_token_layer == pytest.approx(512, rel=0.1)
    assert p.recompute_fraction.linear == pytest.approx(0.3, abs=0.12)
    assert set(fitted.errors) == {"linear", "attention", "recompute", "communication", "memory"}
    assert all(error < 0.08 for error in fitted.errors.values())
    assert p.fit["median_error"] < 0.05
    assert p.fit["points"] == len(CASES)
    assert from_object(json.loads(dumps(p))) == p
    ours, theirs = (CostModel(x, Topology(data_ranks=2, ranks_per_node=2)) for x in (p, t))
    for length in (300, 1000, 3000):  # cases that were not measured
        for degree, mode in ((1, Mode("local", 1)), (2, Mode("ulysses", 2))):
            args = (sample_pack(t, length), degree, mode, 2)
            assert ours.time_us(*args) == pytest.approx(theirs.time_us(*args), rel=0.1)


def test_the_grid_measures_two_depths_and_small_cases_first():
    assert {c.depth for c in CASES} == {2, 4}
    assert {c.degree for c in CASES} == {1, 2}
    assert [c.order for c in CASES] == sorted(c.order for c in CASES)
    assert max(c.tokens / c.degree for c in CASES) == 2048
    with pytest.raises(ConfigError, match="two depths"):
        grid(1, 2048, {})


def test_out_of_memory_rules_out_what_is_larger_and_nothing_else():
    full = Point(case=Case(depth=4, lengths=(1024,)), oom=True)
    assert ruled_out(Case(depth=4, lengths=(2048,)), [full])
    assert ruled_out(Case(depth=4, lengths=(4096,), degree=2, scheme="ring"), [full])
    assert not ruled_out(Case(depth=4, lengths=(1024,), degree=2, scheme="ring"), [full])
    assert not ruled_out(Case(depth=2, lengths=(2048,)), [full])
    assert not ruled_out(Case(depth=4, lengths=(2048,), recompute=4), [full])


def test_points_round_trip_and_damage_is_named():
    point = measure(CASES[3], random.Random(1))
    assert point_from_object(json.loads(json.dumps(point.to_object()))) == point
    with pytest.raises(ConfigError, match="points file"):
        point_from_object({"case": {"depth": 1}})


def test_too_few_points_are_refused():
    with pytest.raises(ConfigError, match="two depths"):
        fit_profile([Point(case=Case(depth=4, lengths=(64,)), time_us=5.0)], SHAPE, name="x")


def test_another_fingerprint_is_refused_unless_forced():
    from dataclasses import replace

    p = replace(truth(4), fingerprint={"device": "A", "model": "m", "torch": "2.13"})
    assert check_fingerprint(p, {"device": "A", "model": "m"}) == []
    with pytest.raises(ConfigError, match=r"device: profile 'A', here 'B'"):
        check_fingerprint(p, {"device": "B", "model": "m"})
    assert len(check_fingerprint(p, {"device": "B", "model": "n"}, force=True)) == 2
