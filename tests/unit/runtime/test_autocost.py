"""`cost="auto"`: shape from the config, state counted from the model."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_dcp.errors import ConfigError
from megatron_dcp.plan import Topology
from megatron_dcp.runtime import autocost
from megatron_dcp.runtime.autocost import (
    auto_profile,
    cost_mark,
    model_spec,
    same_cost,
    state_bytes,
)
from megatron_dcp.runtime.backend import BACKENDS

TWO = Topology(data_ranks=2, ranks_per_node=2)


def model(**config: Any) -> nn.Module:
    values = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100,
        **config,
    }  # fmt: skip
    made = nn.Linear(10, 10, bias=False)
    made.config = SimpleNamespace(**values)
    return made


def test_shape_comes_from_the_config() -> None:
    spec = model_spec(model(num_key_value_heads=2, intermediate_size=80, hidden_act="gelu"))
    assert (spec.layers, spec.heads, spec.kv_heads, spec.head_dim) == (2, 4, 2, 8)
    assert (spec.ffn, spec.mlp_matrices) == (80, 2)
    experts = model_spec(model(moe_intermediate_size=16, num_experts_per_tok=4))
    assert experts.ffn == 64


def test_state_is_what_the_backend_holds() -> None:
    made = model()
    assert state_bytes(made, BACKENDS["ddp"], 2) == 100 * (4 + 4 + 8)
    assert state_bytes(made, BACKENDS["fsdp2"], 2) == 100 * (4 + 4 + 8) // 2
    made.requires_grad_(False)
    assert state_bytes(made, BACKENDS["ddp"], 2) == 400


def test_profile_is_usable() -> None:
    profile = auto_profile(model(), BACKENDS["ddp"], TWO)
    assert profile.static_bytes == 1600
    assert profile.linear_us_per_token > 0
    assert profile.budget_bytes > 10**9


def test_a_run_goes_on_with_the_automatic_profile_of_other_ranks() -> None:
    """It is made anew for them, so its digest differs; anything else that differs is refused."""

    def mark(ranks: int, wrapper: str = "bare", **config: Any) -> dict[str, Any]:
        topology = Topology(data_ranks=ranks, ranks_per_node=ranks)
        found = auto_profile(model(**config), BACKENDS[wrapper], topology)
        return json.loads(json.dumps(cost_mark(found, topology, BACKENDS[wrapper])))

    two = mark(2)
    assert len({two["digest"], mark(4)["digest"], mark(2, "fsdp2")["digest"]}) == 3
    assert all(same_cost(two, now) for now in (mark(2), mark(4), mark(2, "fsdp2")))
    assert not same_cost(two, mark(2, num_hidden_layers=3))
    assert not same_cost(two, mark(4, model_type="another"))
    given = {"name": two["name"], "digest": two["digest"]}  # of a profile that was passed
    assert same_cost(given, mark(2))
    assert not same_cost(given, mark(4))
    assert not same_cost({}, mark(2))


def test_models_without_a_config_are_told_what_to_do() -> None:
    with pytest.raises(ConfigError, match="mdcp profile"):
        auto_profile(nn.Linear(2, 2), BACKENDS["bare"], TWO)


def test_state_above_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(autocost.hardware("cpu-2core"), memory_bytes=1000, reserved_bytes=0)
    monkeypatch.setattr(autocost, "device_hardware", lambda device: small)
    with pytest.raises(ConfigError, match="shard more"):
        auto_profile(model(), BACKENDS["ddp"], TWO)


def test_devices_without_rates_are_refused() -> None:
    with pytest.raises(ConfigError, match="meta"):
        autocost.device_hardware(torch.device("meta"))


def test_a_model_over_the_grid_sends_its_hidden_row_and_cuts_no_heads() -> None:
    grid = model(attention_pairs="grid")
    profile = auto_profile(grid, BACKENDS["ddp"], TWO)
    assert profile.pairs == "grid"
    assert profile.attn_spatial_us_per_pair > 0 < profile.attn_temporal_us_per_pair
    assert profile.comm_bytes_per_token_layer == 2 * 32 * profile.model.element_bytes
    assert profile.head_limits.free
    full = auto_profile(model(attention_pairs="full"), BACKENDS["ddp"], TWO)
    assert (full.pairs, full.comm_bytes_per_token_layer) == ("full", None)
