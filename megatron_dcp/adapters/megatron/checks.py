"""Model settings that cannot run under a plan, or whose gradients would depend on it."""

from __future__ import annotations

from typing import Any

from megatron_dcp.adapters.megatron.experts import check_experts
from megatron_dcp.config import MegatronConfig
from megatron_dcp.errors import AdapterError

NARROW = "its kernels want rows in multiples of 16 and scale by what shares a microbatch"
# Settings of TransformerConfig that want microbatches of one shape, and why.
FIXED_SHAPES = (
    ("fp8", NARROW),
    ("fp4", NARROW),
    ("tp_comm_overlap", "its buffers are made for one sequence length"),
)


def check_model(config: Any, options: MegatronConfig) -> None:
    """Raise AdapterError for the first setting that a plan cannot follow."""
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
    for name, why in FIXED_SHAPES:
        if getattr(config, name, None):
            raise AdapterError(
                f"Megatron model: {name} is {getattr(config, name)!r} and does not run under a "
                f"plan: {why}. Switch it off or run without --mdcp"
            )
    check_experts(config, options)
    pipelined = config.pipeline_model_parallel_size > 1
    if (
        pipelined
        and config.virtual_pipeline_model_parallel_size
        and (not config.overlap_p2p_comm or config.batch_p2p_comm)
    ):
        raise AdapterError(
            "interleaved pipeline: looked for overlap_p2p_comm=True and batch_p2p_comm=False, "
            f"found {config.overlap_p2p_comm} and {config.batch_p2p_comm} (the core's default). "
            "With two stages Megatron then sends activations and gradients to one rank in one "
            "batch and pairs the one with the other (megatron.training asserts against it, the "
            "core does not); with more stages a planned run was not seen to end. Set both"
        )
