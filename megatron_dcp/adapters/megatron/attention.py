"""Attention and RoPE that follow the current placement, as subclasses of Megatron's own modules.

`plan_aware_spec` rewrites a layer or block spec: each self-attention gets a subclass of the class
that it names, and so does its core attention. The subclasses keep parameters, state dict keys and
constructor of the original; without a placement they are the original. The placement travels in
the microbatch's PackedSeqParams, so it is an explicit argument that survives recomputation.

Transformer Engine's attention runs placements of one rank as packed sequences. Those of several
ranks run in this package's schemes: its context parallelism wants samples padded to twice the
degree, plans cut them as they are.

RoPE: Megatron derives positions from rank arithmetic over the static CP group, and wants padded
lengths. Here the table is gathered at the explicit positions of the local tokens, and Megatron
applies it as one sequence: any length, any degree, no patch in its RoPE.
"""

from __future__ import annotations

import copy
import dataclasses
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron_dcp.dist import PlacementContext
from megatron_dcp.errors import AdapterError
from megatron_dcp.schemes import attention

CONTEXT = "mdcp_context"
NO_MIXING = ("IdentityOp", "IdentityFuncOp")  # what stands where a layer has no attention


class _OneRank:
    """A CP group of this rank alone: what THD RoPE asks of a group."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def packed_params(context: PlacementContext, tokens: int) -> Any:
    """PackedSeqParams of a microbatch: one sequence of `tokens` local tokens, and the placement.

    tokens: local tokens including padding rows.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    cu = torch.tensor([0, tokens], dtype=torch.int32, device=context.world.device)
    longest = max(context.max_seqlen, 1)
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    setattr(params, CONTEXT, context)
    return params


def placement_of(packed_seq_params: Any) -> PlacementContext | None:
    """The placement that a microbatch carries, or None for a plain one."""
    return getattr(packed_seq_params, CONTEXT, None)


def sample_params(context: PlacementContext) -> Any:
    """PackedSeqParams that name every sample of a placement on one rank, for a trainer's own THD
    attention; `local_cp_size` 1 switches its static CP group off."""
    if "megatron-samples" not in context.cache:
        from megatron.core.packed_seq_params import PackedSeqParams

        lengths = torch.tensor([0, *context.lengths], dtype=torch.int32)
        cu = torch.cumsum(lengths, 0, dtype=torch.int32).to(context.world.device)
        context.cache["megatron-samples"] = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu,
            cu_seqlens_kv=cu,
            max_seqlen_q=context.max_seqlen,
            max_seqlen_kv=context.max_seqlen,
            local_cp_size=1,
        )
    return context.cache["megatron-samples"]


def packs_by_itself(base: type) -> bool:
    """Whether a core attention knows packed sequences (Transformer Engine's does)."""
    return any(c.__name__ == "TEDotProductAttention" for c in base.__mro__)


def _padded(x: Tensor, rows: int) -> Tensor:
    """Zero rows at the end of dim 0."""
    return x if len(x) == rows else torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])])


def _positions(context: PlacementContext, rows: int) -> Tensor:
    """Position of every local row inside its sample; padding rows have 0."""
    key = ("megatron-positions", rows)
    if key not in context.cache:
        context.cache[key] = _padded(context.position_ids, rows)
    positions: Tensor = context.cache[key]
    return positions


def check_attention_config(config: Any) -> None:
    """Refuse what the plan-aware core attention does not compute."""
    faults = []
    softmax_type = getattr(config, "softmax_type", "vanilla")
    if softmax_type != "vanilla":
        faults.append(f"softmax_type {softmax_type!r} (only 'vanilla')")
    if getattr(config, "attention_dropout", 0.0):
        faults.append(f"attention_dropout {config.attention_dropout} (only 0)")
    if getattr(config, "multi_latent_attention", False):
        faults.append("multi_latent_attention (its RoPE uses rank arithmetic)")
    for name in ("qk_clip", "log_max_attention_logit"):
        if getattr(config, name, False):
            faults.append(f"{name} (the largest logit is not kept)")
    if faults:
        raise AdapterError(
            "Megatron model: plan-aware attention was asked for a model with "
            + "; ".join(faults)
            + ". Change these options or run without --mdcp"
        )


def layer_window(config: Any, layer_number: int) -> tuple[int, int]:
    """The window of one layer, (-1, -1) where it sees everything: Megatron's own choice.

    layer_number: 1-based, over all stages; `window_attn_skip_freq` names layers by it.
    """
    from megatron.core.transformer.utils import is_layer_window_attention

    window = getattr(config, "window_size", None)
    frequency = getattr(config, "window_attn_skip_freq", None)
    if window is None or not is_layer_window_attention(window, frequency, layer_number):
        return -1, -1
    left, right = window
    return left, right


@cache
def plan_aware_core(base: type) -> type:
    """A subclass of a core attention class that follows the placement."""
    if base.__name__.startswith("PlanAware"):
        return base

    packs = packs_by_itself(base)

    class PlanAwareCoreAttention(base):  # type: ignore[misc]
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            check_attention_config(config)
            own = config
            if getattr(config, "context_parallel_size", 1) > 1:
                own = copy.copy(config)  # local cores assert a static CP of 1
                own.context_parallel_size = 1
            super().__init__(own, *args, **kwargs)
            scale = kwargs.get("softmax_scale")
            self.mdcp_scale = scale if scale is not None else config.kv_channels**-0.5
            number = kwargs["layer_number"] if "layer_number" in kwargs else args[0]
            self.mdcp_window = layer_window(config, number)

        def forward(
            self,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | None = None,
            attn_mask_type: Any = None,
            attention_bias: Tensor | None = None,
            packed_seq_params: Any = None,
            **kwargs: Any,
        ) -> Tensor:
            context = placement_of(packed_seq_params)
            if context is None:
                if attn_mask_type is not None:
                    kwargs["attn_mask_type"] = attn_mask_type
                plain: Tensor = super().forward(
                    query,
                    key,
                    value,
                    attention_mask,
                    attention_bias=attention_bias,
                    packed_seq_params=packed_seq_params,
                    **kwargs,
                )
                return plain
            if attention_bias is not None:
                raise AdapterError("plan-aware attention takes no attention_bias, found one")
            rows, held = len(query), context.rows
            if packs and context.degree == 1:
                own: Tensor = super().forward(
                    query[:held],
                    key[:held],
                    value[:held],
                    None,
                    attn_mask_type=attn_mask_type,
                    packed_seq_params=sample_params(context),
                    **kwargs,
                )
                return _padded(own.reshape(held, -1), rows)
            out = attention(
                query[:held],
                key[:held],
                value[:held],
                causal="causal" in getattr(attn_mask_type, "name", "causal"),
                softmax_scale=self.mdcp_scale,
                window_size=self.mdcp_window,
                placement=context,
            )
            return _padded(out.flatten(1), rows)

    PlanAwareCoreAttention.__name__ = f"PlanAware{base.__name__}"
    PlanAwareCoreAttention.__qualname__ = PlanAwareCoreAttention.__name__
    return PlanAwareCoreAttention


@cache
def plan_aware_self_attention(base: type) -> type:
    """A subclass of a self-attention class whose RoPE takes explicit positions."""
    if base.__name__.startswith("PlanAware"):
        return base

    class PlanAwareSelfAttention(base):  # type: ignore[misc]
        mdcp_placement: PlacementContext | None = None  # of the forward that ran last

        def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            context = placement_of(kwargs.get("packed_seq_params"))
            self.mdcp_placement = context
            if context is None:
                return super().forward(hidden_states, *args, **kwargs)
            if kwargs.get("rotary_pos_emb") is not None:
                rows = int(kwargs["packed_seq_params"].cu_seqlens_q[-1])
                kwargs["rotary_pos_emb"] = _gathered(kwargs["rotary_pos_emb"], context, rows)
            static: Any = self.pg_collection  # type: ignore[has-type]
            if static.cp.size() > 1:
                self.pg_collection = copy.copy(static)
                self.pg_collection.cp = _OneRank()
            try:
                return super().forward(hidden_states, *args, **kwargs)
            finally:
                self.pg_collection = static

    PlanAwareSelfAttention.__name__ = f"PlanAware{base.__name__}"
    PlanAwareSelfAttention.__qualname__ = PlanAwareSelfAttention.__name__
    return PlanAwareSelfAttention


def _gathered(table: Any, context: PlacementContext, rows: int) -> Any:
    """RoPE angles of the local rows from a table [positions, 1, 1, d] (or a pair of tables)."""
    if isinstance(table, tuple):
        return tuple(_gathered(t, context, rows) for t in table)
    return table if table is None else table[_positions(context, rows)]


def plan_aware_spec(spec: Any) -> Any:
    """A copy of a layer or block spec whose self-attentions follow the placement.

    spec: a ModuleSpec of a transformer layer, or TransformerBlockSubmodules. Raises AdapterError
    when it holds no self-attention, or a layer that mixes tokens in another way.
    """
    out, found = _rewrite(spec)
    if not found:
        raise AdapterError(
            "Megatron: looked for a self-attention with a core_attention in the layer spec, found "
            f"none in {type(spec).__name__}; give GPTModel a spec of attention layers"
        )
    return out


def _rewrite(spec: Any) -> tuple[Any, int]:
    """A rewritten copy and how many self-attentions it holds."""
    layers = getattr(spec, "layer_specs", None)
    if layers is not None:  # TransformerBlockSubmodules: a stage may have no layer at all
        pairs = [_rewrite(layer) for layer in layers]
        return dataclasses.replace(spec, layer_specs=[p[0] for p in pairs]), sum(
            p[1] for p in pairs
        ) or (not layers)
    submodules = getattr(spec, "submodules", None)
    if submodules is None:
        return spec, 0
    inner = getattr(submodules, "self_attention", None)
    if inner is not None and hasattr(getattr(inner, "submodules", None), "core_attention"):
        new = dataclasses.replace(submodules, self_attention=_rewrite_attention(inner))
        return dataclasses.replace(spec, submodules=new), 1
    if hasattr(submodules, "layer_specs"):
        new, found = _rewrite(submodules)
        return dataclasses.replace(spec, submodules=new), found
    mixer = getattr(inner, "module", inner)
    if mixer is not None and getattr(mixer, "__name__", "") not in NO_MIXING:
        raise AdapterError(_unfollowed(getattr(mixer, "__name__", repr(mixer)), "layer spec"))
    return spec, 0


def _unfollowed(found: str, where: str) -> str:
    return (
        f"Megatron: looked for a plan-aware self-attention in every layer of the {where}, found "
        f"{found}; samples that share a microbatch would reach each other through it, and a sample "
        "on several ranks would be cut. Run such a model without --mdcp"
    )


def check_followed(model: Any) -> None:
    """Raise AdapterError when a model chunk mixes tokens in a way that knows no placement.

    model: what the schedule is given, with its wrappers; its layers are those of `decoder`.
    """
    from megatron.core.utils import get_attr_wrapped_model

    try:
        owner = get_attr_wrapped_model(model, "decoder", return_model_obj=True)
    except RuntimeError as error:
        raise AdapterError(_unfollowed("no decoder", type(model).__name__)) from error
    for layer in owner.decoder.layers:
        mixer = type(getattr(layer, "self_attention", layer)).__name__
        if not mixer.startswith("PlanAware") and mixer not in NO_MIXING:
            raise AdapterError(_unfollowed(mixer, type(owner).__name__))
    if getattr(owner, "position_embedding_type", None) == "mrope":
        raise AdapterError(
            "Megatron: position_embedding_type mrope was asked: its angles are made per token of "
            "a row, the plan-aware attention takes them by position. Use rope or yarn"
        )


def _rewrite_attention(spec: Any) -> Any:
    """The spec of one self-attention with both classes replaced."""
    core = spec.submodules.core_attention
    if isinstance(core, type):
        new_core: Any = plan_aware_core(core)
    elif isinstance(getattr(core, "module", None), type):
        new_core = dataclasses.replace(core, module=plan_aware_core(core.module))
    else:
        raise AdapterError(
            f"Megatron: looked for a core attention class in the layer spec, found {core!r}"
        )
    return dataclasses.replace(
        spec,
        module=plan_aware_self_attention(spec.module),
        submodules=dataclasses.replace(spec.submodules, core_attention=new_core),
    )
