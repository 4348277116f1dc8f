"""Make a Transformers model plan-aware, from outside, and check that it can be.

`prepare(model)` is called by the trainer mixin. In a loop of one's own it must be called by hand,
before DDP, FSDP2, DeepSpeed or Accelerate wrap the model: `initialize_accelerate` refuses a model
that did not go through it, `mdcp.initialize` knows nothing of Transformers. It is idempotent, and
refuses what would make a gradient depend on the plan, each time with the setting to change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from megatron_dcp.adapters.hf.attention import KEYWORD, NAME, register
from megatron_dcp.adapters.hf.checks import check_model
from megatron_dcp.adapters.hf.loss import FusedHead, fuse_head, token_losses
from megatron_dcp.adapters.hf.moe import router_settings, sample_balance_loss
from megatron_dcp.adapters.hf.rope import fix_rotary
from megatron_dcp.adapters.hf.vision import ROW, ImageRows, follow_images, image_inputs
from megatron_dcp.dist import PlacementContext
from megatron_dcp.errors import AdapterError

_TOWERS = ("vision_config", "audio_config", "vq_config")


@dataclass(slots=True, kw_only=True)
class Prepared:
    """What `prepare` found and set. router: (coefficient, experts, top k) or None. images: of a
    vision-language model."""

    model: Any
    head: FusedHead | None
    router: tuple[float, int, int] | None
    rotary_fixed: int
    images: ImageRows | None = None


def prepare(model: Any, *, fused_loss: bool = True, allow_dropout: bool = False) -> Prepared:
    """Switch a model to `attn_implementation="megatron_dcp"` and fix what depends on the plan.

    fused_loss: token losses without whole logits where the model allows it.
    allow_dropout: accept dropout outside attention although its masks depend on the plan.
    """
    found = mark_of(model)
    if found is not None:
        return found
    base = base_model(model)
    register()
    check_model(base, model, allow_dropout)
    towers = [name for name in _TOWERS if getattr(base.config, name, None) is not None]
    if towers:
        base.set_attn_implementation(
            {"text_config": NAME, **dict.fromkeys(towers, "sdpa"), "": NAME}
        )
    else:
        base.set_attn_implementation(NAME)
    if base.config.get_text_config()._attn_implementation != NAME:
        raise AdapterError(
            f"{type(base).__name__} did not accept attn_implementation={NAME!r}: it does not use "
            f"Transformers' AttentionInterface (transformers {transformers.__version__}); call "
            "mdcp.attention(q, k, v) in its own attention instead"
        )
    prepared = Prepared(
        model=base,
        head=fuse_head(base) if fused_loss else None,
        router=router_settings(base.config),
        rotary_fixed=fix_rotary(base),
        images=follow_images(base),
    )
    model._mdcp_prepared = prepared
    return prepared


def mark_of(model: Any) -> Prepared | None:
    """What `prepare` left on this very object. A PEFT model around a prepared one has layers that
    were not looked at, and would hand out its base's attribute."""
    found = vars(model).get("_mdcp_prepared") if isinstance(model, nn.Module) else None
    return found if isinstance(found, Prepared) else None


def base_model(model: Any) -> Any:
    """The Transformers model inside a PEFT one."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(inner, PreTrainedModel):
        raise AdapterError(
            f"expected a Transformers model (or a PEFT model around one), found "
            f"{type(model).__name__}; for a model of your own call mdcp.attention(q, k, v)"
        )
    return inner


def forward_losses(
    prepared: Prepared,
    model: nn.Module,
    inputs: dict[str, Any],
    labels: Tensor,
    ctx: PlacementContext,
) -> tuple[Tensor, Tensor | None]:
    """Token losses [t] of a microbatch and, for a router with a balance loss, this rank's part of
    the sum over its samples.

    model: what the trainer calls (the wrapper); inputs: as the microbatch gives them.
    """
    head, images = prepared.head, prepared.images
    if images is not None and ROW in inputs:
        inputs = image_inputs(images, prepared.model.config, inputs, ctx)
    if head is not None:
        head.labels = labels
    try:
        out = model(**inputs, **{KEYWORD: ctx, "use_cache": False})
    finally:
        if head is not None:
            head.labels = None
        if images is not None:
            images.rows = None
    flat = labels.reshape(-1)
    scores = out.logits.reshape(flat.shape[0], -1)
    losses = scores[:, 0] if head is not None else token_losses(scores, flat)
    if prepared.router is None:
        return losses, None
    _, experts, top_k = prepared.router
    logits = getattr(out, "router_logits", None)
    if not logits:
        raise AdapterError(
            f"{type(prepared.model).__name__} returned no router logits; set output_router_logits "
            "to false to train without the auxiliary loss"
        )
    return losses, sample_balance_loss(logits, ctx, experts=experts, top_k=top_k)


def weighted_sum(losses: Tensor, weights: Tensor) -> Tensor:
    """Sum of token losses by weight; tokens of weight 0 give exactly 0, even if not finite."""
    kept = torch.where(weights != 0, losses, torch.zeros_like(losses))
    return (kept * weights.to(kept.dtype)).sum()
