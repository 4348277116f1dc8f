"""Tiny random Transformers models: the architectures that the integration is tested with."""

from __future__ import annotations

from typing import Any

import torch

VOCAB = 64

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_MOE: dict[str, Any] = {
    "num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.02,
}  # fmt: skip
_LONG: dict[str, Any] = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4, "original_max_position_embeddings": 8,
}  # fmt: skip


def _rope(kind: str, **extra: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **extra}}


# name: (Transformers config class, changes to the base)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-window": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
    "gemma": ("GemmaConfig", {"num_key_value_heads": 1, "head_dim": 8}),
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 8,
            "sliding_window": 6,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 5.0,  # low enough to cap the scores of a tiny model
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8},
    ),
    "gpt-neox": ("GPTNeoXConfig", {"rotary_pct": 0.25}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, **_MOE}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16, **_MOE},
    ),
    "llama-linear": ("LlamaConfig", _rope("linear", factor=4.0)),
    "llama-dynamic": (
        "LlamaConfig",
        {"max_position_embeddings": 8, **_rope("dynamic", factor=2.0)},
    ),
    "llama-yarn": (
        "LlamaConfig",
        _rope("yarn", factor=32.0, original_max_position_embeddings=8),
    ),
    "phi3-longrope": (
        "Phi3Config",
        {"max_position_embeddings": 32, "rope_parameters": _LONG},
    ),
    "mistral": ("MistralConfig", {"sliding_window": 7}),
    "phi3": ("Phi3Config", {}),
    "granite": ("GraniteConfig", {"logits_scaling": 2.0}),
    "olmo2": ("Olmo2Config", {}),
    "cohere": ("CohereConfig", {"logit_scale": 0.5}),
}


def tiny_config(name: str, **changes: Any) -> Any:
    """The configuration of a tiny model."""
    import transformers

    kind, own = MODELS[name]
    values = {**_BASE, **own, **changes}
    if kind == "GPTNeoXConfig":
        values.pop("num_key_value_heads")
    return getattr(transformers, kind)(**values)


def tiny_model(name: str, *, seed: int = 0, attention: str = "eager", **changes: Any) -> Any:
    """A randomly initialised model; weights a little larger than stock, so that gradients of every
    tensor stand well above rounding."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        tiny_config(name, initializer_range=0.08, **changes), attn_implementation=attention
    )
    return model.train()
