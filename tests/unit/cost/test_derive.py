"""Presets: counts against hand arithmetic, derived coefficients against published constants."""

import json
from pathlib import Path

import pytest

from megatron_dcp.cost import CostModel, dumps, from_object, resolve
from megatron_dcp.cost.derive import profile
from megatron_dcp.cost.hardware import HARDWARE
from megatron_dcp.cost.models import MODELS, model
from megatron_dcp.cost.tables import all_tables
from megatron_dcp.errors import ConfigError
from megatron_dcp.plan import Topology

FLEET = Topology(data_ranks=32, ranks_per_node=8)
PAGE = Path(__file__).parents[3] / "docs" / "cost_model.md"


def test_counts_of_a_gpt_layer_by_hand():
    m = model("gpt-7b")
    assert m.layer_parameters == 12 * 4096 * 4096
    assert m.linear_flops_per_token_layer == 72 * 4096 * 4096
    assert m.attention_flops_per_pair_layer == 14 * 4096
    assert m.kept_bytes_per_token_layer(2) == 32 * 4096 + 4 * 32


@pytest.mark.parametrize(
    ("name", "billions"),
    [("gpt-1.3b", 1.3), ("gpt-7b", 6.7), ("gpt-13b", 13), ("gpt-30b", 32), ("gpt-70b", 70),
     ("dit-1.2b-1d", 1.2), ("dit-1.2b-2d", 1.2), ("dit-5b-1d", 4.8), ("dit-5b-2d", 4.8)],
)  # fmt: skip
def test_parameters_match_the_name(name, billions):
    assert model(name).parameters / 1e9 == pytest.approx(billions, rel=0.05)


@pytest.mark.parametrize("name", ["gpt-7b", "gpt-13b", "gpt-30b"])
def test_derived_time_is_within_15_percent_of_the_published_fit(name):
    derived = profile("a100-40g", name, Topology(data_ranks=64, ranks_per_node=8), lockstep=64)
    published = resolve("a100-" + name.replace("-", ""))
    assert derived.linear_us_per_token == pytest.approx(published.linear_us_per_token, rel=0.15)
    assert derived.attn_us_per_pair / 2 == pytest.approx(published.attn_us_per_pair, rel=0.15)


def test_every_combination_is_a_valid_profile_or_says_what_does_not_fit():
    made, refused = 0, []
    for hw in HARDWARE.values():
        topology = FLEET if hw.ranks_per_node == 8 else None
        for m in MODELS.values():
            try:
                p = profile(hw, m, topology)
            except ConfigError as error:
                refused.append(str(error))
                continue
            assert from_object(json.loads(dumps(p))) == p
            assert CostModel(p, topology or Topology(data_ranks=2, ranks_per_node=2)).layers
            made += 1
    assert made > 30
    assert refused
    assert all("--lockstep all" in text for text in refused)


def test_zero3_shards_the_state_and_pays_gathers():
    replicated, sharded = (
        profile("h200", "gpt-7b", FLEET),
        profile("h200", "gpt-7b", FLEET, lockstep=32),
    )
    assert sharded.static_bytes < replicated.static_bytes / 4
    moved = 3 * model("gpt-7b").parameters * 2 * 31 / 32
    launches = 32 * HARDWARE["h200"].efficiency.launch_us_per_layer
    # 8 network ports of 50 GB/s are slower than the 450 GB/s link: 320 GB/s after efficiency
    assert sharded.overhead_us.lockstep == pytest.approx(launches + moved / 320e9 * 1e6)


def test_memory_and_network_can_be_replaced():
    p = profile("h200", "dit-1.2b-1d", FLEET, memory_gb=64, net_gbit_per_s=100)
    assert p.budget_bytes == int(64e9 * 0.92) - 3_000_000_000
    assert p.link(32).us_per_byte == pytest.approx(1e6 / (12.5e9 * 0.8))


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="h200"):
        profile("h300", "gpt-7b")
    with pytest.raises(ConfigError, match="gpt-70b"):
        profile("h200", "gpt-8b")


@pytest.mark.parametrize("rate", [0, -1.0, float("nan"), float("inf")])
def test_impossible_network_rates_are_refused(rate):
    with pytest.raises(ConfigError, match="network rate"):
        profile("h200", "gpt-7b", net_gbit_per_s=rate)


@pytest.mark.parametrize("title", list(all_tables()))
def test_the_page_shows_the_tables_that_the_command_prints(title):
    assert all_tables()[title] in PAGE.read_text()
