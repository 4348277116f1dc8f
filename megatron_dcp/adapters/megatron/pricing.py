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
from megatron_dcp.cost.derive import GRADIENT_BYTES, OPTIMIZER_BYTES
from megatron_dcp.cost.derive import profile as derive
from megatron_dcp.cost.hardware import hardware
from megatron_dcp.cost.models import ModelSpec
from megatron_dcp.cost.profile import Overhead
from megatron_dcp.errors import ConfigError
from megatron_dcp.plan import Topology
from megatron_dcp.runtime.autocost import BOUNDLESS

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
    """One TP rank's slice of a Megatron TransformerConfig, by the work of a token.

    In a mixture of experts a token visits top-k of them; `state_bytes` counts those that are held.
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


def _weights(config: Any, spec: ModelSpec) -> tuple[int, int]:
    """(all but experts, experts): weights that one TP x EP rank holds of all layers."""
    experts = getattr(config, "num_moe_experts", None)
    if not experts:
        return spec.parameters, 0
    often = getattr(config, "moe_layer_freq", 1)  # every so many layers, or 0 and 1 by layer
    sparse = sum(often) if isinstance(often, list) else -(-config.num_layers // often)
    shared = getattr(config, "moe_shared_expert_intermediate_size", None) or 0
    rows = (config.num_layers - sparse) * config.ffn_hidden_size + sparse * shared
    per_row = spec.mlp_matrices * spec.hidden
    rest = replace(spec, ffn=0).parameters
    rest += per_row * rows // config.tensor_model_parallel_size
    expert = getattr(config, "moe_ffn_hidden_size", None) or config.ffn_hidden_size
    per_row = spec.mlp_matrices * (getattr(config, "moe_latent_size", None) or spec.hidden)
    held = sparse * experts * expert * per_row
    return rest, held // (config.expert_model_parallel_size * _expert_tensor_size(config))


def _expert_tensor_size(config: Any) -> int:
    return int(config.expert_tensor_parallel_size or config.tensor_model_parallel_size)


def state_bytes(config: Any, spec: ModelSpec, topology: Topology, element_bytes: int) -> int:
    """Weights, gradients and optimizer of one rank, as `megatron_dcp.cost.derive` counts them.

    The optimizer's part is shared by the ranks that hold the same weights: all data ranks, and for
    experts as many of the TP x data ranks as are not needed to hold all of them.
    """
    rest, experts = _weights(config, spec)
    spread = config.expert_model_parallel_size * _expert_tensor_size(config)
    copies = max(1, topology.data_ranks * config.tensor_model_parallel_size // spread)
    held: int = (rest + experts) * (element_bytes + GRADIENT_BYTES)
    held += rest * OPTIMIZER_BYTES // topology.data_ranks + experts * OPTIMIZER_BYTES // copies
    return held // topology.pipeline_stages


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
        profile = _derived(config, spec, topology)
    else:
        profile = resolve(planner.cost)
        _check_model(profile, spec)
    if planner.memory_gb is not None:
        return profile.with_budget(budget_bytes(planner.memory_gb))
    if megatron.max_tokens_per_rank is not None:
        return profile.with_budget(
            budget_of_tokens(profile, topology, megatron.max_tokens_per_rank)
        )
    if planner.cost == "auto" and profile.static_bytes >= profile.budget_bytes:
        raise ConfigError(
            "--mdcp-cost auto: weights, gradients and optimizer state (shared by the ranks with "
            f"the same weights) are counted as {profile.static_bytes / 1e9:.1f} GB per rank, "
            f"{profile.budget_bytes / 1e9:.1f} GB are usable on {hardware_name()}. Use more "
            "tensor, pipeline or expert parallelism or more ranks. Where this run holds less than "
            "that (a smaller optimizer, or one on the host), say what fits with "
            "--mdcp-max-tokens-per-rank N, or with --mdcp-memory-gb X (the state as counted "
            "included), or measure with `mdcp profile` and pass --mdcp-cost FILE"
        )
    return profile


def _derived(config: Any, spec: ModelSpec, topology: Topology) -> CostProfile:
    """The analytic profile, with the state that a rank of this configuration holds."""
    hw = hardware(hardware_name())
    base = derive(replace(hw, memory_bytes=BOUNDLESS), spec, topology)
    return replace(
        base,
        static_bytes=state_bytes(config, spec, topology, hw.element_bytes),
        budget_bytes=hw.budget_bytes,
        # Lockstep here means aligned slots, not ZeRO-3: no parameters are gathered.
        overhead_us=Overhead(async_=base.overhead_us.async_, lockstep=base.overhead_us.async_),
    )


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
