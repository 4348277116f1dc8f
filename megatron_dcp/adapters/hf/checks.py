"""What `prepare` refuses: models whose gradient would depend on the plan, each with the setting.

Random draws are looked for on the modules, where a PEFT model or a vision tower has its own, and
in the text config, for dropout that is a function call. Draws written into a model's code without
any setting are known by the model's name alone.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from megatron_dcp.adapters.hf.moe import unsupported_layers
from megatron_dcp.errors import AdapterError

_DROPOUTS = (
    "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "resid_pdrop", "embd_pdrop",
    "emb_pdrop", "hidden_dropout", "hidden_dropout_prob", "activation_dropout", "mlp_dropout",
    "embedding_dropout", "embed_dropout", "resid_dropout", "residual_dropout", "dropout",
    "dropout_p",
)  # fmt: skip
# Attributes of modules. A skipped layer leaves the other ranks of its block waiting.
_NOISE = (
    "jitter_noise", "router_jitter_noise", "input_jitter_noise", "moe_jitter_eps", "layerdrop",
)  # fmt: skip
_DRAWS = {"phimoe": "its router (sparsemixer) draws an expert per token"}


def check_model(model: Any, outer: nn.Module, allow_dropout: bool) -> None:
    """model: the Transformers model. outer: what is trained, the PEFT model around it or itself."""
    name = type(model).__name__
    kinds = unsupported_layers(model)
    if kinds:
        raise AdapterError(
            f"{name} has layers of kind {', '.join(kinds)}, which carry state along the sequence "
            "or cut it into fixed chunks; full and sliding attention are supported"
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise AdapterError(f"{name} is an encoder-decoder; decoder-only models are supported")
    _check_causal(model)
    noise = _noise(model, outer)
    if noise:
        raise AdapterError(
            f"{name} draws random numbers in training ({noise}); they are drawn per microbatch and "
            "would depend on the plan. Set what is named to 0 where it is a setting; such a model "
            "cannot be trained otherwise"
        )
    active = _dropout(model, outer)
    if active and not allow_dropout:
        raise AdapterError(
            f"{name} has dropout {active}; its masks are drawn per microbatch and would depend on "
            "the plan. Set it to 0 in the config (of LoRA: lora_dropout), or pass "
            "allow_dropout=True to accept that (attention dropout is never accepted)"
        )


def _check_causal(model: Any) -> None:
    """A label is the token after: a model that sees that token would learn to copy it."""
    name = type(model).__name__
    if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        both_ways = model.config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
        if both_ways and not getattr(model.config, "is_decoder", False):
            raise AdapterError(
                f"{name} attends both ways with is_decoder=False; decoder-only causal language "
                "models are supported: set is_decoder=True in its config"
            )
    elif name in MODEL_FOR_MASKED_LM_MAPPING_NAMES.values():
        raise AdapterError(
            f"{name} is a masked language model, whose labels stand at their own tokens; only "
            "decoder-only causal language models, whose labels are the next tokens, are supported"
        )


def _noise(model: Any, outer: nn.Module) -> str:
    found = {
        f"{key}={value}"
        for module in outer.modules()
        for key, value in vars(module).items()
        if key in _NOISE and isinstance(value, int | float) and value > 0
    }
    draws = _DRAWS.get(str(getattr(model.config, "model_type", "")))
    return ", ".join(sorted(found | ({draws} if draws else set())))


def _dropout(model: Any, outer: nn.Module) -> dict[str, float]:
    """Probabilities above 0 by their name in the config or, of modules, in the model."""
    config = model.config.get_text_config()
    found = {k: v for k in _DROPOUTS if (v := getattr(config, k, 0.0)) not in (None, 0, 0.0)}
    modules = {k: m.p for k, m in outer.named_modules() if isinstance(m, _DropoutNd) and m.p > 0}
    first = next(iter(modules), None)
    if first is not None:
        more = f" and {len(modules) - 1} more modules" if len(modules) > 1 else ""
        found[first + more] = modules[first]
    return found
