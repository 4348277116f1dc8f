"""Model settings under which gradients would depend on the plan."""

from __future__ import annotations

from typing import Any

from megatron_dcp.adapters.megatron.experts import check_experts
from megatron_dcp.config import MegatronConfig
from megatron_dcp.errors import AdapterError


def check_model(config: Any, options: MegatronConfig) -> None:
    """Model settings under which gradients would depend on the plan. Raises AdapterError."""
    if not config.calculate_per_token_loss:
        raise AdapterError(
            "Megatron: looked for calculate_per_token_loss, found False: the mean over "
            "microbatches depends on the plan. Pass --calculate-per-token-loss"
        )
    if config.hidden_dropout and not options.allow_plan_dependent:
        raise AdapterError(
            f"hidden_dropout is {config.hidden_dropout}: Megatron draws it per rank, so its "
            "pattern depends on the plan. Pass --hidden-dropout 0 or --mdcp-allow-plan-dependent"
        )
    check_experts(config, options)
    two_stages = config.pipeline_model_parallel_size == 2
    if two_stages and config.virtual_pipeline_model_parallel_size and not config.overlap_p2p_comm:
        raise AdapterError(
            "interleaved pipeline of two stages: looked for overlap_p2p_comm=True and "
            f"batch_p2p_comm=False, found {config.overlap_p2p_comm} and {config.batch_p2p_comm} "
            "(the core's default). Megatron then sends activations and gradients to one rank in "
            "one batch and pairs the one with the other; megatron.training asserts against it, the "
            "core does not. Set both, or use more stages"
        )
