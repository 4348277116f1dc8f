"""A mixture of experts under a plan: which router settings are followed, which are refused."""

from __future__ import annotations

from typing import Any

from megatron_dcp.adapters.megatron.balance import SEQUENCE, SampleBalance
from megatron_dcp.adapters.megatron.frequencies import GLOBAL, ExpertFrequencies, GlobalBalance
from megatron_dcp.adapters.megatron.patchset import signature_fault
from megatron_dcp.adapters.megatron.routers import ExpertBias, StandIn, ZLoss
from megatron_dcp.config import MegatronConfig
from megatron_dcp.errors import AdapterError

FOLLOWED: tuple[type[StandIn], ...] = (SampleBalance, GlobalBalance, ZLoss, ExpertBias)

# Settings of TransformerConfig whose result depends on the microbatch, and why.
PLAN_DEPENDENT = (
    ("moe_expert_capacity_factor", "drops tokens; use dropless routing"),
    ("moe_expert_rank_capacity_factor", "drops tokens; use dropless routing"),
    ("moe_input_jitter_eps", "noise is drawn per rank"),
    ("moe_router_force_load_balancing", "random routes, for benchmarks"),
    ("moe_router_force_biased", "random routes, for benchmarks"),
    ("moe_enable_routing_replay", "routes are replayed by microbatch"),
)

# Options that pad unequal rows for HybridEP: of 0.19 and main, of dev; before, there is none.
HYBRID_PADDING = ("moe_hybridep_pad_uneven_dispatch_inputs", "moe_hybridep_pad_variable_tokens")


def balance_kinds(config: Any) -> list[tuple[str, float]]:
    """(load balancing type, its coefficient) of a configuration with experts."""
    kinds, coefficients = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    kinds = kinds if isinstance(kinds, list) else [kinds]
    coefficients = coefficients if isinstance(coefficients, list) else [coefficients] * len(kinds)
    return list(zip(kinds, map(float, coefficients), strict=True))


def uses_global_loss(config: Any) -> bool:
    """Whether a model's loss needs the expert frequencies of the previous step."""
    experts = getattr(config, "num_moe_experts", None)
    return bool(experts) and any(k == GLOBAL and c for k, c in balance_kinds(config))


def check_experts(config: Any, options: MegatronConfig) -> list[str]:
    """Refuse experts whose gradients would depend on what shares a microbatch.

    Returns the settings of that kind which the option allows, each with its reason.
    """
    if not getattr(config, "num_moe_experts", None):
        return []
    _check_communication(config)
    followed = [k for k, c in balance_kinds(config) if c and k in (SEQUENCE, GLOBAL)]
    followed += [c.kind for c in (ZLoss, ExpertBias) if getattr(config, c.kind, None)]
    if (
        followed
        and config.recompute_granularity == "selective"
        and "moe" in (config.recompute_modules or [])
    ):
        raise AdapterError(
            f"{followed[0]} with recompute_modules moe: a router that is recomputed without the "
            "attention of its layer cannot tell the microbatch. Leave moe out of "
            "--recompute-modules; plans recompute whole layers where memory asks for it"
        )
    faults = []
    for kind, coefficient in balance_kinds(config):
        if kind in ("sinkhorn", "quantile_balancing"):
            faults.append(f"moe_router_load_balancing_type {kind} (routes by the whole microbatch)")
        elif coefficient and kind not in (SEQUENCE, GLOBAL, "none"):
            faults.append(
                f"moe_router_load_balancing_type {kind} (use {SEQUENCE}, {GLOBAL} or coefficient 0)"
            )
    faults += [f"{name} ({why})" for name, why in PLAN_DEPENDENT if getattr(config, name, None)]
    if faults and not options.allow_plan_dependent:
        raise AdapterError(
            "mixture of experts whose gradients depend on what shares a microbatch: "
            + "; ".join(faults)
            + ". Change this or pass --mdcp-allow-plan-dependent"
        )
    return faults


def _check_communication(config: Any) -> None:
    """Refuse what makes ranks wait for, or send to, ranks whose microbatches are not like theirs.

    No option allows these: such a run hangs or moves wrong rows.
    """
    if config.context_parallel_size > 1:
        for kind, coefficient in balance_kinds(config):
            if kind == "quantile_balancing" or (kind == "aux_loss" and coefficient):
                raise AdapterError(
                    f"mixture of experts: moe_router_load_balancing_type {kind} with "
                    f"context_parallel_size {config.context_parallel_size}: each forward "
                    "communicates over the context-parallel ranks, which are data ranks with "
                    "other numbers of microbatches under a plan, and would wait for ever. Use "
                    f"{SEQUENCE} or {GLOBAL}, or --context-parallel-size 1"
                )
    # Expert tensor parallelism wider than the attention's spreads tokens over data ranks, too.
    wide = (config.expert_tensor_parallel_size or 1) > config.tensor_model_parallel_size
    if config.expert_model_parallel_size == 1 and not wide:
        return
    if config.moe_token_dispatcher_type == "allgather":
        raise AdapterError(
            "mixture of experts: looked for moe_token_dispatcher_type alltoall or flex, found "
            "allgather, which needs equal token counts. Pass --moe-token-dispatcher-type alltoall"
        )
    if config.moe_token_dispatcher_type == "flex":
        _check_flex(config)
    if config.moe_pad_expert_input_to_capacity:
        raise AdapterError(
            "mixture of experts: moe_pad_expert_input_to_capacity with expert_model_parallel_size "
            f"{config.expert_model_parallel_size} and expert_tensor_parallel_size "
            f"{config.expert_tensor_parallel_size}: the capacity follows "
            "from a rank's own tokens and all ranks exchange as many rows as it says, but under a "
            "plan their tokens differ. Remove --moe-pad-expert-input-to-capacity"
        )


def _check_flex(config: Any) -> None:
    """Refuse backends of the flex dispatcher that want equally many rows on all ranks."""
    backend = config.moe_flex_dispatcher_backend
    if backend == "ncclep":
        raise AdapterError(
            "mixture of experts: moe_flex_dispatcher_backend ncclep makes its buffers for the "
            "tokens of a rank's first microbatch, those of a plan differ. Pass another "
            "--moe-flex-dispatcher-backend or --moe-token-dispatcher-type alltoall"
        )
    if backend != "hybridep":
        return
    found = [name for name in HYBRID_PADDING if hasattr(config, name)]
    if not any(getattr(config, name) for name in found):
        advice = (
            f"Pass --{found[0].replace('_', '-')}"
            if found
            else "This version has no option that pads them: pass another "
            "--moe-flex-dispatcher-backend or --moe-token-dispatcher-type alltoall"
        )
        raise AdapterError(
            "mixture of experts: moe_flex_dispatcher_backend hybridep wants equally many rows on "
            f"all ranks of an expert group, those of a plan differ. {advice}"
        )


def follow_experts(chunk: Any, frequencies: ExpertFrequencies) -> int:
    """Let every router of a model chunk follow the plan, as far as its settings need it.

    Returns how many methods were replaced. Raises AdapterError where a router is not as it was
    tested.
    """
    found = 0
    for layer in chunk.modules():
        router = getattr(getattr(layer, "mlp", None), "router", None)
        attention = getattr(layer, "self_attention", None)
        if router is None or attention is None:
            continue
        for cls in FOLLOWED:
            if not cls.wanted(router):
                continue
            _check_router(router, attention, cls)
            stand_in = cls(router, attention)
            if isinstance(stand_in, GlobalBalance):
                stand_in.frequencies = frequencies
            setattr(router, cls.method, stand_in)
            found += 1
    return found


def _check_router(router: Any, attention: Any, cls: type[StandIn]) -> None:
    fault = signature_fault(getattr(router, cls.method), cls.parameters)
    if fault is None and not hasattr(attention, "mdcp_placement"):
        fault = "looked for a plan-aware self-attention beside the router"
    if fault:
        raise AdapterError(
            f"Megatron: {cls.kind} under a plan: {fault}. Switch it off or use a tested version"
        )
