"""What the check of a model says of real configurations of megatron-core, without ranks.

A loop of its own meets no other check: megatron.training's arguments are refused before.
"""

from __future__ import annotations

import logging
import types
from typing import Any

import pytest

from megatron_dcp.adapters.megatron.checks import check_model, check_wrapping
from megatron_dcp.config import MegatronConfig
from megatron_dcp.errors import AdapterError

pytest.importorskip("megatron.core")


def config(*, cls: str = "TransformerConfig", **changed: Any) -> Any:
    from megatron.core.transformer import transformer_config

    plain = {
        "num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "hidden_dropout": 0.0,
        "attention_dropout": 0.0, "calculate_per_token_loss": True,
    }  # fmt: skip
    return getattr(transformer_config, cls)(**{**plain, **changed})


def check(*, allowed: bool = False, **changed: Any) -> None:
    check_model(config(**changed), MegatronConfig(allow_plan_dependent=allowed))


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"mtp_num_layers": 1}, "mtp_num_layers is 1"),
        # Megatron turns the first two into the third.
        ({"enable_cuda_graph": True}, "enable_cuda_graph is True"),
        ({"external_cuda_graph": True}, "external_cuda_graph is True"),
        ({"cuda_graph_impl": "local"}, "cuda_graph_impl is 'local'"),
        (
            {"cls": "MLATransformerConfig", "multi_latent_attention": True},
            "multi_latent_attention is True",
        ),
        ({"heterogeneous_block_specs": True}, "heterogeneous_block_specs is True"),
        ({"hybrid_context_parallel": True}, "hybrid_context_parallel is True"),
        ({"fp8": "e4m3"}, "fp8 is 'e4m3'"),
    ],
)
def test_what_the_arguments_refuse_is_refused_in_a_loop_of_its_own(
    changed: dict[str, Any], text: str
) -> None:
    check()
    with pytest.raises(AdapterError, match=f"{text} and does not run under a plan"):
        check(**changed, allowed=True)


def test_overlapped_expert_communication_is_refused() -> None:
    """Megatron takes the setting together with others only; set where it is read."""
    settings = config()
    settings.overlap_moe_expert_parallel_comm = True
    with pytest.raises(AdapterError, match="overlap_moe_expert_parallel_comm is True"):
        check_model(settings, MegatronConfig())


def test_a_model_under_an_fsdp_of_megatron_is_refused() -> None:
    import torch
    from megatron.core.distributed import (
        DistributedDataParallelConfig,
        TorchFullyShardedDataParallel,
    )

    class Wrapped(torch.nn.Module):
        def __init__(self, ddp_config: Any) -> None:
            super().__init__()
            self.ddp_config = ddp_config

    check_wrapping(torch.nn.Linear(1, 1))  # no wrapper at all
    check_wrapping(Wrapped(types.SimpleNamespace()))
    check_wrapping(Wrapped(DistributedDataParallelConfig(use_distributed_optimizer=True)))
    with pytest.raises(AdapterError, match="found Wrapped, which does not run under a plan"):
        check_wrapping(Wrapped(DistributedDataParallelConfig(use_megatron_fsdp=True)))
    # Needs process groups to be built; its class says what it is.
    unbuilt = TorchFullyShardedDataParallel.__new__(TorchFullyShardedDataParallel)
    torch.nn.Module.__init__(unbuilt)
    with pytest.raises(AdapterError, match="found TorchFullyShardedDataParallel"):
        check_wrapping(unbuilt)


INTERLEAVED = {
    "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2,
    "pipeline_dtype": "float32", "overlap_p2p_comm": True, "batch_p2p_comm": False,
}  # fmt: skip


def test_interleaving_in_groups_larger_than_the_pipeline_is_refused() -> None:
    check(**INTERLEAVED)  # Megatron resolves the default to the stages
    check(**INTERLEAVED, microbatch_group_size_per_vp_stage=2)
    text = "microbatch_group_size_per_vp_stage is 4, the pipeline has 2 stages"
    with pytest.raises(AdapterError, match=text):
        check(**INTERLEAVED, microbatch_group_size_per_vp_stage=4)
    check(microbatch_group_size_per_vp_stage=4)  # nothing is interleaved


EXPERTS = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.0,
    "moe_token_dispatcher_type": "alltoall",
}  # fmt: skip
BALANCED = {**EXPERTS, "moe_aux_loss_coeff": 0.1, "moe_router_load_balancing_type": "aux_loss"}
PADDED = {
    **EXPERTS, "moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True,
}  # fmt: skip
FLEX = {**EXPERTS, "moe_token_dispatcher_type": "flex", "expert_model_parallel_size": 2}
HYBRID = {**FLEX, "moe_flex_dispatcher_backend": "hybridep"}


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (
            {**BALANCED, "context_parallel_size": 2},
            "aux_loss with context_parallel_size 2: each forward communicates",
        ),
        (
            {
                **BALANCED, "context_parallel_size": 2, "moe_aux_loss_coeff": [0.1, 0.1],
                "moe_router_load_balancing_type": ["seq_aux_loss", "aux_loss"],
            },
            "aux_loss with context_parallel_size 2: each forward communicates",
        ),
        (
            {**PADDED, "expert_model_parallel_size": 2},
            "moe_pad_expert_input_to_capacity with expert_model_parallel_size 2",
        ),
        (
            {**FLEX, "moe_token_dispatcher_type": "allgather"},
            "allgather, which needs equal token counts",
        ),
        (HYBRID, "This version has no option that pads them"),  # 0.16
    ],
)  # fmt: skip
def test_experts_that_ranks_cannot_run_apart_are_refused_with_the_option_too(
    changed: dict[str, Any], text: str
) -> None:
    for allowed in (False, True):
        with pytest.raises(AdapterError, match=text):
            check(**changed, allowed=allowed)


def test_experts_that_ranks_can_run_apart_pass() -> None:
    check(**FLEX)  # DeepEP sends what each rank has
    check(**{**HYBRID, "expert_model_parallel_size": 1})
    check(**BALANCED, allowed=True)
    check(**PADDED, allowed=True)
    check(**{**BALANCED, "moe_aux_loss_coeff": 0.0, "context_parallel_size": 2})
    follows = {"moe_router_load_balancing_type": "seq_aux_loss", "context_parallel_size": 2}
    check(**{**BALANCED, **follows})


@pytest.mark.parametrize(
    "option", ["moe_hybridep_pad_uneven_dispatch_inputs", "moe_hybridep_pad_variable_tokens"]
)
def test_hybridep_runs_where_uneven_rows_are_padded(option: str) -> None:
    """0.16 has neither option; set where 0.19, main and the branch dev have them."""
    settings = config(**HYBRID)
    setattr(settings, option, False)
    with pytest.raises(AdapterError, match=f"Pass --{option.replace('_', '-')}"):
        check_model(settings, MegatronConfig())
    setattr(settings, option, True)
    check_model(settings, MegatronConfig())


def test_the_log_names_what_the_option_has_allowed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="megatron_dcp"):
        check(allowed=True)
        assert caplog.messages == []
        check(**BALANCED, hidden_dropout=0.1, moe_input_jitter_eps=0.2, allowed=True)
    (line,) = caplog.messages
    for name in ("hidden_dropout 0.1", "moe_router_load_balancing_type aux_loss",
                 "moe_input_jitter_eps"):  # fmt: skip
        assert name in line


def test_hidden_dropout_is_refused_without_the_option() -> None:
    with pytest.raises(AdapterError, match=r"hidden_dropout is 0\.1"):
        check(hidden_dropout=0.1)
