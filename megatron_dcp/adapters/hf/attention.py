"""`attn_implementation="megatron_dcp"`: Transformers attention over the current placement.

The placement travels as the forward keyword `mdcp_placement`, which every Transformers decoder
hands down to its attention function, also when a layer is recomputed; where a model drops unknown
keywords, the placement that is current is read instead (the engine keeps it current through the
backward of its microbatch).

Outside a microbatch (evaluation, generation) the stock SDPA attention and its masks are used: the
model behaves as if it had been loaded with `attn_implementation="sdpa"`. In training a missing
placement is an error, because a shard would then attend to itself alone.

Shapes: q [1, H, t, D]; k, v [1, Hk, t, D], after RoPE by global positions; out [1, t, H, D].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from megatron_dcp.dist import PlacementContext, current_or_none
from megatron_dcp.errors import AdapterError
from megatron_dcp.schemes import attention

NAME = "megatron_dcp"
KEYWORD = "mdcp_placement"


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that Transformers calls; returns (out [1, t, H, D], None)."""
    placement: PlacementContext | None = kwargs.pop(KEYWORD, None) or current_or_none()
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if placement is None:
        _check_outside(module, softcap)
        out, _ = sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            scaling=scaling,
            dropout=dropout,
            is_causal=is_causal,
            sliding_window=sliding_window,
            **kwargs,
        )
        return out, None
    _refuse(module, query, dropout, kwargs)
    head_dim, value_dim = query.shape[-1], value.shape[-1]
    if value_dim != head_dim:  # latent attention: one head dim for all, cropped again below
        value = nn.functional.pad(value, (0, head_dim - value_dim))
    query, key, value = one_dtype(query, key, value)
    out = attention(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        causal=causal,
        # Transformers counts the query itself: a window of w sees w - 1 keys to the left.
        window_size=(-1, -1) if sliding_window is None else (int(sliding_window) - 1, -1),
        softmax_scale=scaling,
        softcap=0.0 if softcap is None else float(softcap),
        placement=placement,
    )
    return out[..., :value_dim].unsqueeze(0), None


def one_dtype(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under autocast RoPE and norms leave q and k in fp32 while v is half: take autocast's type,
    as Transformers' flash attention does; otherwise the widest of the three."""
    if query.dtype == key.dtype == value.dtype and not torch.is_autocast_enabled(query.device.type):
        return query, key, value
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
    else:
        dtype = torch.promote_types(torch.promote_types(query.dtype, key.dtype), value.dtype)
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _check_outside(module: nn.Module, softcap: float | None) -> None:
    """Whether stock SDPA may stand in where no placement is given."""
    if module.training and torch.is_grad_enabled():
        raise AdapterError(
            f"attn_implementation={NAME!r} ran in training outside a microbatch: iterate the "
            "engine's loader and pass `**mb.inputs` to the model, or load the model with "
            "attn_implementation='sdpa' for a loop of your own"
        )
    if softcap is not None:
        raise AdapterError(
            f"{type(module).__name__} caps its attention scores, which SDPA cannot do; evaluate "
            "inside `with mdcp.packed([length, ...]):` or with attn_implementation='eager'"
        )


def _refuse(module: nn.Module, query: Tensor, dropout: float, kwargs: dict[str, Any]) -> None:
    name = type(module).__name__
    if query.shape[0] != 1:
        raise AdapterError(
            f"{name} got a batch of {query.shape[0]} rows inside a microbatch; microbatches are "
            "packed: pass `**mb.inputs` ([1, tokens]) unchanged"
        )
    if dropout:
        raise AdapterError(
            f"{name} asks for attention dropout {dropout}; set `attention_dropout` to 0 in the "
            "model's config: a mask drawn inside the kernel would depend on the plan"
        )
    for option, what in (("s_aux", "attention sinks"), ("position_bias", "a position bias")):
        if kwargs.get(option) is not None:
            raise AdapterError(f"{name} uses {what} ({option}), which no scheme supports")


def attention_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """No mask inside a microbatch (the placement says who sees whom), SDPA's outside."""
    if current_or_none() is not None:
        return None
    mask: Tensor | None = sdpa_mask(*args, **kwargs)
    return mask


def register() -> None:
    """Make `attn_implementation="megatron_dcp"` known; importing `adapters.hf` does it."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)
