"""The cost profile of a Megatron model: `auto` derives it from the model's own configuration.

One data rank holds 1/TP of the heads, of the MLP and of the vocabulary, so the profile describes
that slice: Ulysses is limited by the heads of one TP rank. `auto` is the analytic roofline of
`megatron_dcp.cost.derive` on the hardware preset that the device names, not a measurement; a fitted
profile (`mdcp profile`) predicts better and is used the same way (`--mdcp-cost FILE`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from megatron_dcp.adapters.megatron import standins
from megatron_dcp.config import MegatronConfig, PlannerConfig
from megatron_dcp.cost import CostModel, CostProfile, Mode, Pack, budget_bytes, resolve
from megatron_dcp.cost.derive import profile as derive
from megatron_dcp.cost.models import ModelSpec
from megatron_dcp.cost.profile import Overhead
from megatron_dcp.errors import ConfigError
from megatron_dcp.plan import Topology

# The first preset whose marks all stand in the device's name (lower case).
_DEVICES = (
    ("a100-80g", ("a100", "80")),
    ("a100-40g", ("a100",)),
    ("h200", ("h200",)),
    ("h100", ("h100",)),
    ("b200", ("b200",)),
)


def hardware_name() -> str:
    """The hardware preset of this process' device."""
    if not standins.gpu_present():
        return "cpu-2core"
    name = torch.cuda.get_device_name().lower()
    for preset, marks in _DEVICES:
        if all(mark in name for mark in marks):
            return preset
    known = ", ".join(preset for preset, _ in _DEVICES)
    raise ConfigError(
        f"--mdcp-cost auto: no hardware preset for device {name!r} (known: {known}); measure one "
        "with `mdcp profile` and pass --mdcp-cost FILE"
    )


def model_spec(config: Any, vocab: int) -> ModelSpec:
    """One TP rank's slice of a Megatron TransformerConfig.

    A mixture of experts is priced by the experts that a token visits (top-k).
    """
    tp = config.tensor_model_parallel_size
    groups = config.num_query_groups or config.num_attention_heads
    ffn = config.ffn_hidden_size
    experts = getattr(config, "num_moe_experts", None)
    if experts:
        ffn = (getattr(config, "moe_ffn_hidden_size", None) or ffn) * config.moe_router_topk
    return ModelSpec(
        name="megatron",
        source="TransformerConfig",
        pairs="causal",
        layers=config.num_layers,
        hidden=config.hidden_size,
        heads=max(1, config.num_attention_heads // tp),
        kv_heads=max(1, groups // tp),
        head_dim=config.kv_channels,
        ffn=max(1, ffn // tp),
        mlp_matrices=3 if config.gated_linear_unit else 2,
        vocab=max(1, vocab // tp),
    )


def model_profile(
    config: Any,
    vocab: int,
    topology: Topology,
    planner: PlannerConfig,
    megatron: MegatronConfig,
) -> CostProfile:
    """The profile and budget of a run. Raises ConfigError when the file does not fit the model."""
    spec = model_spec(config, vocab)
    if planner.cost == "auto":
        base = derive(hardware_name(), spec, topology)
        # Lockstep here means aligned slots, not ZeRO-3: no parameters are gathered.
        overhead = Overhead(async_=base.overhead_us.async_, lockstep=base.overhead_us.async_)
        profile = replace(base, overhead_us=overhead)
    else:
        profile = resolve(planner.cost)
        _check_model(profile, spec)
    if planner.memory_gb is not None:
        return profile.with_budget(budget_bytes(planner.memory_gb))
    if megatron.max_tokens_per_rank is not None:
        return profile.with_budget(
            budget_of_tokens(profile, topology, megatron.max_tokens_per_rank)
        )
    return profile


def budget_of_tokens(profile: CostProfile, topology: Topology, tokens: int) -> int:
    """Bytes that a microbatch of so many tokens needs on one rank without recomputation."""
    if tokens < 1:
        raise ConfigError(f"--mdcp-max-tokens-per-rank is {tokens}; it must be >= 1")
    model = CostModel(profile, topology)
    return model.bytes(Pack(tokens=tokens), 1, Mode("local", 1), 0)


def _check_model(profile: CostProfile, spec: ModelSpec) -> None:
    """A profile measured on another model plans wrongly: layers and heads must agree."""
    found, want = profile.model, spec.shape(profile.model.element_bytes)
    for name in ("layers", "heads", "kv_heads", "head_dim", "hidden"):
        if getattr(found, name) != getattr(want, name) and not profile.head_limits.free:
            raise ConfigError(
                f"cost profile {profile.name!r} is of a model with {name} "
                f"{getattr(found, name)}, this model has {getattr(want, name)} on a TP rank; "
                "measure this model with `mdcp profile`"
            )
