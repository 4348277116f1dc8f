"""Online refit: linear features equal the model, drift is found, nothing changes by itself."""

import random

import numpy as np
import pytest

from megatron_dcp.cost import CostModel, CostProfile, Link, ModelShape, resolve, sample_pack
from megatron_dcp.cost.derive import profile as preset
from megatron_dcp.cost.features import coefficients, features
from megatron_dcp.cost.online import OnlineRefit
from megatron_dcp.cost.profile import Overhead
from megatron_dcp.errors import ConfigError
from megatron_dcp.plan import Topology

TOPOLOGY = Topology(data_ranks=8, ranks_per_node=4)


def base(**changes):
    values = {
        "name": "base",
        "model": ModelShape(layers=4, heads=8, kv_heads=4, head_dim=16, hidden=128, vocab=64,
                            element_bytes=4),
        "linear_us_per_token": 20.0,
        "attn_us_per_pair": 0.02,
        "attn_half_tokens": 32,
        "overhead_us": Overhead(async_=4000.0, lockstep=6000.0),
        "links": (Link(max_degree=4, us_per_byte=0.002, latency_us=40.0),
                  Link(max_degree=8, us_per_byte=0.01, latency_us=90.0)),
    }  # fmt: skip
    return CostProfile(**{**values, **changes})


def cases(cost, count, seed):
    rng = random.Random(seed)
    for _ in range(count):
        degree = rng.choice([1, 1, 2, 4, 8])
        mode = rng.choice(cost.modes(degree))
        recompute = rng.choice([0, 0, cost.layers])
        yield sample_pack(cost.profile, rng.randint(64, 6000)), degree, mode, recompute


def test_features_times_coefficients_is_the_model():
    for profile in (base(), resolve("a100-gpt7b")):
        for lockstep in (1, 8):
            cost = CostModel(profile, TOPOLOGY, lockstep)
            theta = coefficients(cost).vector()
            for pack, degree, mode, recompute in cases(cost, 100, 1):
                linear = float(np.dot(features(cost, pack, degree, mode, recompute), theta))
                exact = cost.time_us(pack, degree, mode, recompute)
                assert linear == pytest.approx(exact, abs=0.51)


def test_a_drifted_machine_is_followed_within_a_few_steps():
    """Compute 30 % slower, network twice as slow, 5 % noise: the refit predicts to about 5 %."""
    assumed = CostModel(base(), TOPOLOGY)
    truth = CostModel(
        base(
            linear_us_per_token=26.0,
            attn_us_per_pair=0.026,
            links=(Link(max_degree=4, us_per_byte=0.004, latency_us=80.0),
                   Link(max_degree=8, us_per_byte=0.02, latency_us=180.0)),
        ),
        TOPOLOGY,
    )  # fmt: skip
    refit, noise = OnlineRefit(cost=assumed), random.Random(5)
    for case in cases(assumed, 300, 2):
        refit.observe(features(assumed, *case), truth.time_us(*case) * noise.gauss(1, 0.05))
    proposal = refit.propose()
    assert proposal is not None
    assert proposal.error_before > 0.2
    assert proposal.error_after < 0.06
    assert proposal.profile.name == "base+refit1"
    assert "adopted only at a checkpoint" in proposal.log_line()
    learned = CostModel(proposal.profile, TOPOLOGY)
    errors = [
        abs(learned.time_us(*case) / truth.time_us(*case) - 1) for case in cases(truth, 200, 3)
    ]
    assert np.median(errors) < 0.03
    assert refit.cost.profile.name == "base"  # observing alone changes nothing
    after = refit.adopt(proposal.profile)
    assert after.cost.profile.ref != assumed.profile.ref
    assert after.version == 2


def test_equal_observations_give_equal_bytes():
    def run():
        cost = CostModel(base(), TOPOLOGY)
        refit = OnlineRefit(cost=cost)
        for case in cases(cost, 100, 4):
            refit.observe(features(cost, *case), 1.5 * cost.time_us(*case))
        return refit.propose().profile.ref

    assert run() == run()


def test_a_good_profile_is_left_alone_and_outliers_do_not_move_it():
    cost = CostModel(base(), TOPOLOGY)
    refit, noise = OnlineRefit(cost=cost), random.Random(6)
    for k, case in enumerate(cases(cost, 300, 7)):
        stall = 20.0 if k % 50 == 49 else 1.0
        refit.observe(features(cost, *case), cost.time_us(*case) * noise.gauss(1, 0.02) * stall)
    assert refit.propose(least_gain=0.02) is None
    assert refit.metrics["cost/error_in_use"] < 0.1


def test_profiles_that_are_not_linear_are_refused():
    with pytest.raises(ConfigError, match="mdcp profile"):
        OnlineRefit(cost=CostModel(preset("h200", "dit-1.2b-2d", TOPOLOGY), TOPOLOGY))
    with pytest.raises(ConfigError, match="positive"):
        OnlineRefit(cost=CostModel(base(), TOPOLOGY)).observe([1.0] * 5, 0.0)
