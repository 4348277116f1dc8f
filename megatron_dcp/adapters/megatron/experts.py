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


def check_experts(config: Any, options: MegatronConfig) -> None:
    """Refuse experts whose gradients would depend on what shares a microbatch."""
    if not getattr(config, "num_moe_experts", None):
        return
    if config.expert_model_parallel_size > 1 and config.moe_token_dispatcher_type == "allgather":
        raise AdapterError(
            "mixture of experts: looked for moe_token_dispatcher_type alltoall or flex, found "
            "allgather, which needs equal token counts. Pass --moe-token-dispatcher-type alltoall"
        )
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
