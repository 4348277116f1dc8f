"""`cost="auto"`: an analytic cost profile from the model's own config and the device it is on.

Works for any module with a Transformers-like `config` (hidden_size, num_hidden_layers, ...). The
rates are the hardware preset's; what the ranks hold is counted from the model and its backend. A
measured profile (`mdcp profile`) predicts better and is used in its place when given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from megatron_dcp.cost import CostProfile, digest
from megatron_dcp.cost.derive import profile
from megatron_dcp.cost.hardware import Hardware, hardware
from megatron_dcp.cost.models import ModelSpec
from megatron_dcp.errors import ConfigError
from megatron_dcp.plan import Topology
from megatron_dcp.runtime.backend import Backend, unwrap

_ADVICE = "run `mdcp profile` and pass its file as `cost`, or pass a preset's name or a CostProfile"
_SOURCE = "analytic, cost=auto"
BOUNDLESS = 10**15  # memory under which `derive`'s own check of the state, replaced here, passes


def auto_profile(model: nn.Module, backend: Backend, topology: Topology) -> CostProfile:
    """The profile of a model on its device, for the ranks of `topology`.

    Raises ConfigError for a model without such a config, an unknown device, or state alone above
    the memory.
    """
    inner = unwrap(model)
    spec = model_spec(inner)
    device = next((p.device for p in inner.parameters()), torch.device("cpu"))
    hw = device_hardware(device)
    held = state_bytes(inner, backend, backend.domain or topology.data_ranks)
    if held >= hw.budget_bytes:
        raise ConfigError(
            f"cost='auto': {spec.name} holds {held / 1e9:.1f} GB of parameters, gradients and "
            f"optimizer state per rank under {backend.name}, {hw.budget_bytes / 1e9:.1f} GB are "
            f"usable on {hw.name}; shard more (FSDP2, ZeRO-3) or use more ranks"
        )
    found = profile(replace(hw, memory_bytes=BOUNDLESS), spec, topology)
    if found.pairs == "grid":
        found = replace(found, **_switched(found))
    return replace(
        found,
        static_bytes=held,
        budget_bytes=hw.budget_bytes,
        fingerprint={"hardware": hw.name, "model": spec.name, "source": _SOURCE},
    )


def cost_mark(profile: CostProfile, topology: Topology, backend: Backend) -> dict[str, Any]:
    """What a checkpoint says of the profile that its plans were made with."""
    mark: dict[str, Any] = {"name": profile.name, "digest": digest(profile)}
    if profile.fingerprint.get("source") == _SOURCE:
        mark["automatic"] = dict(profile.fingerprint)
        mark["for"] = [topology.data_ranks, topology.ranks_per_node, backend.name]
    return mark


def same_cost(saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether a run may go on with the profile of `now`: the same one, or the automatic one of the
    same model and device for other ranks or another wrapper, which it is made anew for."""
    if (saved.get("name"), saved.get("digest")) == (now["name"], now["digest"]):
        return True
    automatic = saved.get("automatic")
    same = automatic is not None and automatic == now.get("automatic")
    return same and saved.get("for") != now["for"]


def _switched(found: CostProfile) -> dict[str, Any]:
    """What a model that calls `switch_rows` once per block sends: its hidden row, both ways.

    That is the same for every scheme, cuts no heads, and lies outside of what is recomputed.
    """
    return {
        "comm_bytes_per_token_layer": 2 * found.model.hidden * found.model.element_bytes,
        "recompute_fraction": replace(found.recompute_fraction, comm=0.0),
    }


def model_spec(model: nn.Module) -> ModelSpec:
    """Shape of a transformer from its `config`; `attention_pairs` there is causal (the default),
    full, or grid (inside frames and along pixels in turn)."""
    config: Any = getattr(model, "config", None)
    if config is not None and hasattr(config, "get_text_config"):
        config = config.get_text_config()
    wanted = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    missing = [name for name in wanted if not hasattr(config, name)]
    if missing:
        raise ConfigError(
            f"cost='auto' reads the model's `config`; {type(model).__name__} has no "
            f"{', '.join(missing)} there: {_ADVICE}"
        )
    hidden, heads = int(config.hidden_size), int(config.num_attention_heads)
    return ModelSpec(
        name=str(getattr(config, "model_type", type(model).__name__.lower())),
        source="the model's config",
        pairs=str(getattr(config, "attention_pairs", "causal")),
        layers=int(config.num_hidden_layers),
        hidden=hidden,
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or hidden // heads),
        ffn=_ffn(config, hidden),
        mlp_matrices=2 if getattr(config, "hidden_act", "silu") in ("gelu", "gelu_new") else 3,
        vocab=int(config.vocab_size),
    )


def _ffn(config: Any, hidden: int) -> int:
    """Width of the MLP that a token goes through; experts count as often as a token takes them."""
    width = getattr(config, "moe_intermediate_size", None) or getattr(
        config, "intermediate_size", None
    )
    return int(width or 4 * hidden) * int(getattr(config, "num_experts_per_tok", None) or 1)


def device_hardware(device: torch.device) -> Hardware:
    """The preset of a device."""
    if device.type == "cpu":
        return hardware("cpu-2core")
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device).lower()
        memory = torch.cuda.get_device_properties(device).total_memory
        for key in ("b200", "h200", "h100"):
            if key in name:
                return hardware(key)
        if "a100" in name:
            return hardware("a100-80g" if memory > 50e9 else "a100-40g")
        raise ConfigError(f"cost='auto' knows no rates of {name!r}: {_ADVICE}")
    raise ConfigError(f"cost='auto' knows no rates of device {str(device)!r}: {_ADVICE}")


def state_bytes(model: nn.Module, backend: Backend, ranks: int) -> int:
    """Parameters, gradients and Adam state of one rank; frozen parameters have neither.

    ranks: over how many sharded parts are divided.
    """
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    element = max((p.element_size() for p in model.parameters()), default=4)
    # Gradients of low-precision parameters are kept in float32 where they are ours to keep.
    ours = backend.name in ("bare", "ddp")
    gradient = max(element, 4) if ours else element
    held = backend.resident_bytes(trained, ranks, element_bytes=element, gradient_bytes=gradient)
    still = frozen * element
    return held + (still if backend.whole("parameters") else -(-still // ranks))
