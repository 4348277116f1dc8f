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
    "jetmoe": (
        "JetMoeConfig",
        {
            "kv_channels": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "output_router_logits": True,
            "aux_loss_coef": 0.02,
        },
    ),
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


IMAGE_TOKEN = VOCAB - 1
# One image embedding per 4 x 4 pixels (llava), per 2 x 2 patches of 4 x 4 pixels (Qwen).
_GRID_VISION: dict[str, Any] = {
    "depth": 2, "hidden_size": 32, "num_heads": 2, "in_channels": 3, "patch_size": 4,
    "temporal_patch_size": 2, "spatial_merge_size": 2,
}  # fmt: skip
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_IDS = {"image_token_id": IMAGE_TOKEN, "video_token_id": VOCAB - 2,
        "vision_start_token_id": VOCAB - 3, "vision_end_token_id": VOCAB - 4}  # fmt: skip

# name: (config class, text model, changes to its base, vision values)
VISION_MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llava": (
        "LlavaConfig",
        "llama",
        {},
        {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48,
         "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8, "patch_size": 4},
    ),
    "qwen2-vl": (
        "Qwen2VLConfig",
        "qwen2",
        {"rope_parameters": _MROPE},
        {**_GRID_VISION, "embed_dim": 32, "mlp_ratio": 2},
    ),
    "qwen2.5-vl": (
        "Qwen2_5_VLConfig",
        "qwen2",
        {"rope_parameters": _MROPE},
        {**_GRID_VISION, "intermediate_size": 48, "out_hidden_size": 32, "window_size": 16,
         "fullatt_block_indexes": [1]},
    ),
    "qwen3-vl": (
        "Qwen3VLConfig",
        "qwen3",
        {"head_dim": 8, "rope_parameters": _MROPE},
        {**_GRID_VISION, "intermediate_size": 48, "out_hidden_size": 32,
         "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    ),
}  # fmt: skip


def tiny_vision_config(name: str) -> Any:
    """The configuration of a tiny vision-language model."""
    import transformers

    kind, text, own, vision = VISION_MODELS[name]
    values = {**_BASE, **own, "initializer_range": 0.08}
    if name == "llava":
        values["model_type"] = text
        return transformers.LlavaConfig(
            vision_config=vision, text_config=values, image_token_id=IMAGE_TOKEN,
            vision_feature_layer=-1, vision_feature_select_strategy="default",
        )  # fmt: skip
    return getattr(transformers, kind)(vision_config=vision, text_config=values, **_IDS)


def tiny_vision_model(name: str, *, seed: int = 0) -> Any:
    """A randomly initialised vision-language model."""
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(
        tiny_vision_config(name), attn_implementation="eager"
    )
    return model.train()


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
