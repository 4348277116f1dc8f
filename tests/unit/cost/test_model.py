"""The formulas against numbers worked out by hand, and the profile file."""

import json
import math

import pytest

from megatron_dcp.cost import (
    CostModel,
    CostProfile,
    Link,
    Mode,
    ModelShape,
    digest,
    dumps,
    from_object,
    resolve,
    sample_pack,
)  # fmt: skip
from megatron_dcp.cost.model import wire_bytes, wire_bytes_parts
from megatron_dcp.errors import ConfigError
from megatron_dcp.plan import Topology

A100 = resolve("a100-gpt7b")
T64 = Topology(data_ranks=64, ranks_per_node=8)


def profile(**changes):
    base = {
        "name": "unit",
        "model": ModelShape(layers=4, heads=8, kv_heads=2, head_dim=16, hidden=128, vocab=10,
                            element_bytes=2),
        "links": (Link(max_degree=8, us_per_byte=0.001, latency_us=2.0),
                  Link(max_degree=64, us_per_byte=0.01, latency_us=5.0)),
        "linear_us_per_token": 2.0,
        "attn_us_per_pair": 0.5,
        "budget_bytes": 10**9,
    }  # fmt: skip
    return CostProfile(**{**base, **changes})


@pytest.mark.parametrize(
    ("degree", "gb_per_s"), [(1, None), (2, 119.5), (3, 104), (8, 96.5), (16, 10.33), (24, 5.94)]
)
@pytest.mark.parametrize("recompute", [0, 7, 32])
def test_the_preset_is_the_published_formula(degree, gb_per_s, recompute):
    lengths = [6000, 17, 381]
    total, squares = sum(lengths), sum(n * n for n in lengths)
    ms = (5.128e-6 * squares + 0.1839576 * total) / degree * (1 + recompute / 96) + 20
    if gb_per_s:
        ms += 2097152 * total / degree / (gb_per_s * 1e6)
    cost = CostModel(A100, T64)
    pack = sample_pack(A100, 6000) + sample_pack(A100, 17) + sample_pack(A100, 381)
    assert abs(cost.time_us(pack, degree, cost.modes(degree)[0], recompute) - ms * 1000) <= 0.51
    needed = total / degree * 4.48e6 * ((32 - recompute) + recompute / 8) / 32
    assert abs(cost.bytes(pack, degree, Mode("ring", 1), recompute) - needed) <= 1.0


def test_the_preset_fits_6400_tokens_and_8_times_that_with_full_recompute():
    cost = CostModel(A100, T64)
    local = Mode("local", 1)
    assert cost.bytes(sample_pack(A100, 6400), 1, local, 0) == A100.budget_bytes
    assert cost.bytes(sample_pack(A100, 51_200), 1, local, 32) == A100.budget_bytes


def test_the_preset_names_its_schemes_by_rule():
    modes = {d: CostModel(A100, T64).modes(d) for d in (1, 3, 4, 8, 16, 24)}
    assert modes == {1: [Mode("local", 1)], 3: [Mode("ring", 1)], 4: [Mode("ulysses", 4)],
                     8: [Mode("ulysses", 8)], 16: [Mode("hybrid", 8)],
                     24: [Mode("hybrid", 8)]}  # fmt: skip


def test_lockstep_takes_its_own_overhead():
    assert CostModel(A100, T64, lockstep=64).overhead_us == 629_000.0
    assert CostModel(A100, T64, lockstep=1).overhead_us == 20_000.0


def test_wire_bytes_by_hand():
    # T = 64 tokens on 4 ranks: 16 each. H 8, Hk 2, D 16, e 2, a 4, rep 2.
    p = profile()
    row = 2 * 2 * 16  # K and V elements of one token
    ulysses = 3 / 4 * 16 * (2 * 8 + 2 * 2 * 2) * 16 * 2
    assert wire_bytes(p, Mode("ulysses", 4), 64, 4) == (2 * ulysses, 0.0)
    assert wire_bytes_parts(p, Mode("ring", 1), 64, 4) == (
        0.0, 0.0, 3 * 16 * row * 2, (3 * 2 + 4 * 4) * 16 * row)  # fmt: skip
    assert wire_bytes_parts(p, Mode("allgather", 1), 64, 4) == (
        0.0, 0.0, 3 * 16 * row * 2, 3 * (2 + 4) * 16 * row)  # fmt: skip
    # Hybrid 4 x 2 on 8 ranks: 8 tokens each; ring of 2 with ceil(2 * 2 / 4) = 1 KV head.
    inner = 3 / 4 * 8 * (2 * 8 + 2 * 2 * 2) * 16 * 2
    assert wire_bytes_parts(p, Mode("hybrid", 4), 64, 8) == (
        inner, inner, 1 * 32 * (2 * 1 * 16) * 2, (1 * 2 + 2 * 4) * 32 * (2 * 1 * 16))  # fmt: skip


def test_efficiency_is_x_over_x_plus_half():
    p = profile(linear_half_tokens=50, attn_half_tokens=30)
    lengths, d = [40, 7], 2
    linear = sum(lengths) / d / ((sum(lengths) / d) / (sum(lengths) / d + 50)) * 2.0
    attn = sum(0.5 * n * (n + 1) / 2 / d / ((n / d) / (n / d + 30)) for n in lengths)
    pack = sample_pack(p, 40) + sample_pack(p, 7)
    got = CostModel(p, T64).parts_us(pack, d, Mode("ulysses", 2), 0)
    assert math.isclose(got[0], linear, rel_tol=1e-12)
    assert math.isclose(got[1], attn, rel_tol=1e-12)


def test_grid_pairs():
    p = profile(pairs="grid", attn_us_per_pair=0.0, attn_spatial_us_per_pair=1.0,
                attn_temporal_us_per_pair=10.0)  # fmt: skip
    pack = sample_pack(p, 24, (4, 2, 3))
    assert (pack.pairs, pack.pairs2) == (4 * 36, 6 * 16)
    assert CostModel(p, T64).parts_us(pack, 1, Mode("local", 1), 0)[1] == 144 + 960
    with pytest.raises(ConfigError, match="no shapes"):
        sample_pack(p, 24)


def test_overlap_hides_communication_but_never_below_zero():
    pack = sample_pack(profile(), 64)
    plain = CostModel(profile(), T64).parts_us(pack, 4, Mode("ring", 1), 0)
    from megatron_dcp.cost.profile import Overlap

    half = CostModel(profile(overlap=Overlap(ring=0.01)), T64).parts_us(pack, 4, Mode("ring", 1), 0)
    assert math.isclose(half[2], plain[2] - 0.01 * plain[1])
    full = CostModel(profile(overlap=Overlap(ring=1.0)), T64).parts_us(pack, 4, Mode("ring", 1), 0)
    assert full[2] == 0.0


def test_pipeline_divides_time_and_multiplies_kept_memory():
    p = profile(kept_bytes_per_token_layer=100, checkpoint_bytes_per_token_layer=10)
    one = CostModel(p, Topology(data_ranks=8, ranks_per_node=8))
    two = CostModel(p, Topology(data_ranks=8, ranks_per_node=8, pipeline_stages=2))
    pack, local = sample_pack(p, 10), Mode("local", 1)
    assert two.time_us(pack, 1, local, 0) * 2 == one.time_us(pack, 1, local, 0)
    assert one.bytes(pack, 1, local, 0) == two.bytes(pack, 1, local, 0) == 10 * 4 * 100
    with pytest.raises(ConfigError, match="3 pipeline stages"):
        _ = CostModel(p, Topology(data_ranks=8, ranks_per_node=8, pipeline_stages=3)).layers


def test_round_trip_keeps_the_digest():
    again = from_object(json.loads(dumps(A100)))
    assert again == A100
    assert digest(again) == digest(A100)


def test_fingerprint_and_fit_do_not_change_the_digest():
    obj = json.loads(dumps(A100))
    obj["fingerprint"], obj["fit"] = {"device": "x"}, {"points": 3}
    assert digest(from_object(obj)) == digest(A100)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"schema": "mdcp.cost/2"}, "schema"),
        ({"pairs": "triangle"}, "pairs"),
        ({"linear_us_per_token": -1}, "linear_us_per_token"),
        ({"linear_us_per_token": "1"}, "linear_us_per_token"),
        ({"links": []}, "links"),
        ({"surprise": 1}, "surprise"),
        ({"overlap": {"ring": 2.0}}, "overlap.ring"),
        ({"model": {}}, "missing keys"),
        ({"head_bytes_per_token": 1e300}, "head_bytes_per_token is 1e[+]300"),
        ({"attn_us_per_pair": 10**400}, r"1000000000.*\(401 characters\)"),
        ({"static_bytes": float("nan")}, "static_bytes is nan"),
        ({"budget_bytes": 2.8672e10}, "budget_bytes is 28672000000.0, it must be an integer"),
        ({"budget_bytes": True}, "budget_bytes"),
        ({"name": "\ud800"}, "surrogates"),
        (
            {"overhead_us": {"async_": 5.0}},
            r"unknown keys \['async_'\]; known are \['async', 'lock",
        ),
        ({"links": [{"max_degree": True, "us_per_byte": 0.0, "latency_us": 0.0}]}, "max_degree"),
    ],
)
def test_a_bad_profile_says_which_key(change, text):
    with pytest.raises(ConfigError, match=text):
        from_object({**json.loads(dumps(A100)), **change})


def test_unknown_preset_lists_the_known():
    with pytest.raises(ConfigError, match="a100-gpt13b"):
        resolve("a100-gpt99b")
