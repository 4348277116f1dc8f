"""Model settings that cannot run under a plan, or whose gradients would depend on it."""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist

from megatron_dcp.adapters.megatron.experts import check_experts
from megatron_dcp.adapters.megatron.flags import CONFLICTS, GATHERS, OWN_FEATURES, switched_on
from megatron_dcp.config import MegatronConfig
from megatron_dcp.errors import AdapterError

log = logging.getLogger("megatron_dcp")

NARROW = "its kernels want rows in multiples of 16 and scale by what shares a microbatch"
OWN_PLANNERS = tuple((name, "it plans the step itself") for name in OWN_FEATURES)
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
    for name, value, why in switched_on(config, (*CONFLICTS, *OWN_PLANNERS, *FIXED_SHAPES)):
        raise AdapterError(
            f"Megatron model: {name} is {value!r} and does not run under a plan: {why}. Switch it "
            "off or run without --mdcp"
        )
    _warn(config, check_experts(config, options))
    _check_interleaving(config)


def _warn(config: Any, allowed: list[str]) -> None:
    """One line of the log, from one process, on what --mdcp-allow-plan-dependent has allowed."""
    if config.hidden_dropout:
        allowed = [f"hidden_dropout {config.hidden_dropout} (drawn per rank)", *allowed]
    if allowed and not (dist.is_initialized() and dist.get_rank()):
        log.warning(
            "--mdcp-allow-plan-dependent: gradients depend on the plan by %s", "; ".join(allowed)
        )


def _check_interleaving(config: Any) -> None:
    """Refuse schedules of several chunks per stage that end or hang at a planned step."""
    stages = config.pipeline_model_parallel_size
    if stages == 1 or not config.virtual_pipeline_model_parallel_size:
        return
    group = getattr(config, "microbatch_group_size_per_vp_stage", None)
    if group not in (None, stages):
        raise AdapterError(
            f"interleaved pipeline: microbatch_group_size_per_vp_stage is {group}, the pipeline "
            f"has {stages} stages. Plans have as few microbatches as the lengths allow, in "
            "multiples of the stages, and Megatron ends at a step that has fewer than a group. "
            "Leave --microbatch-group-size-per-virtual-pipeline-stage out"
        )
    if not config.overlap_p2p_comm or config.batch_p2p_comm:
        raise AdapterError(
            "interleaved pipeline: looked for overlap_p2p_comm=True and batch_p2p_comm=False, "
            f"found {config.overlap_p2p_comm} and {config.batch_p2p_comm} (the core's default). "
            "With two stages Megatron then sends activations and gradients to one rank in one "
            "batch and pairs the one with the other (megatron.training asserts against it, the "
            "core does not); with more stages a planned run was not seen to end. Set both"
        )


def check_wrapping(chunk: Any) -> None:
    """Raise AdapterError for a model chunk that is wrapped by one of Megatron's FSDPs."""
    sharded = getattr(getattr(chunk, "ddp_config", None), "use_megatron_fsdp", False)
    if sharded or "FullyShardedDataParallel" in type(chunk).__name__:
        raise AdapterError(
            f"Megatron model: found {type(chunk).__name__}, which does not run under a plan: "
            f"{GATHERS}. Wrap the model in DistributedDataParallel (use_distributed_optimizer "
            "shards the optimizer's state)"
        )
