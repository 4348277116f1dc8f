"""The state that `--mdcp-cost auto` counts for a mixture of experts, against figures by hand.

Mixtral-8x7B's shape: 32 layers, hidden 4096, 32 heads of 128, 8 KV heads, MLP of 14336 with three
matrices, 8 experts of which a token visits 2, vocabulary 32000 (one matrix is counted).

    attention, a layer   4096 x 128 x (32 + 2 x 8 + 32)  =    41,943,040
    32 of them                                           = 1,342,177,280
    vocabulary           32000 x 4096                    =   131,072,000
    all but experts                                      = 1,473,249,280
    an expert, a layer   3 x 4096 x 14336                =   176,160,768
    32 of them                                           = 5,637,144,576

A bf16 weight and its float32 gradient take 6 bytes, the optimizer 12 over the ranks that hold the
same weights. An H100 of 80 GB has 0.92 x 80 - 3 = 70.6 GB usable.
"""

from __future__ import annotations

from typing import Any

import pytest

from megatron_dcp.adapters.megatron import pricing
from megatron_dcp.config import MegatronConfig, PlannerConfig
from megatron_dcp.cost import CostProfile
from megatron_dcp.errors import ConfigError
from megatron_dcp.plan import Topology

pytest.importorskip("megatron.core")

REST, EXPERT = 1_473_249_280, 5_637_144_576


@pytest.fixture(autouse=True)
def _on_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pricing, "hardware_name", lambda: "h100")


def mixtral(**changed: Any) -> Any:
    import torch
    from megatron.core.transformer import TransformerConfig

    plain = {
        "num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_query_groups": 8,
        "ffn_hidden_size": 14336, "gated_linear_unit": True, "num_moe_experts": 8,
        "activation_func": torch.nn.functional.silu, "moe_router_topk": 2,
        "moe_token_dispatcher_type": "alltoall", "add_bias_linear": False,
    }  # fmt: skip
    return TransformerConfig(**{**plain, **changed})


def priced(
    config: Any, ranks: int, stages: int = 1, tokens: int | None = None, **planner: Any
) -> CostProfile:
    topology = Topology(data_ranks=ranks, ranks_per_node=min(ranks, 8), pipeline_stages=stages)
    megatron = MegatronConfig(max_tokens_per_rank=tokens)
    return pricing.model_profile(config, 32000, topology, PlannerConfig(**planner), megatron)


def test_a_rank_holds_its_experts_and_shares_the_optimizer_with_those_that_hold_the_same() -> None:
    profile = priced(mixtral(expert_model_parallel_size=8), 64)
    # One expert, of which 64 / 8 = 8 ranks hold a copy.
    by_hand = 6 * (REST + EXPERT) + REST * 12 // 64 + EXPERT * 12 // 8
    assert by_hand == 51_394_314_240
    assert profile.static_bytes == by_hand  # of 70.6 GB: it runs
    # Work goes by the two experts of a token, wherever they are.
    alone = priced(mixtral(expert_model_parallel_size=1), 64, memory_gb=1000)
    assert alone.linear_us_per_token == profile.linear_us_per_token
    assert alone.static_bytes == 6 * (REST + 8 * EXPERT) + (REST + 8 * EXPERT) * 12 // 64


@pytest.mark.parametrize(
    ("changed", "ranks", "stages", "held"),
    [
        # All eight experts on every rank: 46.6 B weights.
        ({}, 8, 1, 46_570_405_888 * 6 + 46_570_405_888 * 12 // 8),
        # One expert and no copy of it: 7.1 B weights, the optimizer of 5.6 B of them whole.
        ({"expert_model_parallel_size": 8}, 8, 1, 7_110_393_856 * 6 + REST * 12 // 8 + EXPERT * 12),
    ],
)
def test_a_state_that_does_not_fit_is_refused_with_flags_that_exist(
    changed: dict[str, Any], ranks: int, stages: int, held: int
) -> None:
    config = mixtral(**changed)
    with pytest.raises(ConfigError, match=rf"counted as {held / 1e9:.1f} GB per rank, 70\.6 GB"):
        priced(config, ranks, stages)
    with pytest.raises(ConfigError) as caught:
        priced(config, ranks, stages)
    for flag in ("--mdcp-cost FILE", "--mdcp-memory-gb", "--mdcp-max-tokens-per-rank"):
        assert flag in str(caught.value)
    assert "lockstep" not in str(caught.value)
    # The run may hold less than is counted: both flags are heard.
    assert priced(config, ranks, stages, memory_gb=400).budget_bytes == 400_000_000_000
    by_tokens = priced(config, ranks, stages, tokens=4096)
    assert by_tokens.static_bytes == held < by_tokens.budget_bytes


def test_tensor_parallel_ranks_may_hold_whole_experts() -> None:
    """TP 2, EP 4, 8 ranks: cut in two over tensor ranks every part is there once, whole twice."""
    tp = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    rest = REST // 2
    for expert_tp, experts, copies in ((2, 2 * EXPERT // 2, 1), (1, 2 * EXPERT, 2)):
        config = mixtral(**tp, expert_model_parallel_size=4, expert_tensor_parallel_size=expert_tp)
        held = 6 * (rest + experts) + rest * 12 // 4 + experts * 12 // copies
        assert priced(config, 4, memory_gb=1000).static_bytes == held


def test_layers_without_experts_and_shared_experts_are_held_whole() -> None:
    """Two layers in four have 8 experts of 1024 rows and a shared one of 2048."""
    config = mixtral(
        moe_layer_freq=[0, 1, 0, 1], num_layers=4, moe_ffn_hidden_size=1024,
        moe_shared_expert_intermediate_size=2048, expert_model_parallel_size=2,
    )  # fmt: skip
    per_row = 3 * 4096
    rest = 4 * 41_943_040 + 131_072_000 + per_row * (2 * 14336 + 2 * 2048)
    experts = 2 * 4 * per_row * 1024
    held = 6 * (rest + experts) + rest * 12 // 8 + experts * 12 // 4
    assert priced(config, 8).static_bytes == held
    every_other = mixtral(
        moe_layer_freq=2, num_layers=4, moe_ffn_hidden_size=1024,
        moe_shared_expert_intermediate_size=2048, expert_model_parallel_size=2,
    )  # fmt: skip
    assert priced(every_other, 8).static_bytes == held


def test_a_dense_model_is_counted_as_the_cost_model_counts_it() -> None:
    from megatron_dcp.cost.derive import profile as derive

    config = mixtral(num_moe_experts=None, num_layers=8)
    topology = Topology(data_ranks=8, ranks_per_node=8, pipeline_stages=2)
    same = derive("h100", pricing.model_spec(config, 32000), topology)
    profile = priced(config, 8, stages=2)
    assert (profile.static_bytes, profile.budget_bytes) == (same.static_bytes, same.budget_bytes)
