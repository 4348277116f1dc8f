"""Recompute levels: bytes kept for backward, counted, and what ran twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron_dcp.dist import PlacementContext, local_context, use_placement
from megatron_dcp.runtime.recompute import wrap_layers
from megatron_dcp.schemes import attention
from megatron_dcp.testing.cases.attention import block_context, cached_world
from megatron_dcp.testing.live_bytes import live_bytes
from megatron_dcp.testing.models import Attend, TinyLayer, TinyModel, rotate, weighted_loss_sum


class Core(nn.Module):
    """Attention with its projections as one module: what `selective` recomputes."""

    def __init__(self, layer: TinyLayer) -> None:
        super().__init__()
        self.qkv, self.proj = layer.qkv, layer.proj
        self.heads, self.kv_heads, self.dim = layer.heads, layer.kv_heads, layer.dim

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        qkv = self.qkv(x).view(x.shape[0], -1, self.dim)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        out = attention(rotate(q, position_ids), rotate(k, position_ids), v)
        mixed: Tensor = self.proj(out.reshape(x.shape[0], -1))
        return mixed


class CoreLayer(nn.Module):
    """The tiny model's layer with attention as a module of its own."""

    def __init__(self, layer: TinyLayer) -> None:
        super().__init__()
        self.norm, self.mlp, self.core = layer.norm, layer.mlp, Core(layer)

    def forward(self, x: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        x = x + self.core(self.norm(x), position_ids)
        out: Tensor = x + self.mlp(x)
        return out


def live_bytes_case(
    *, points: Sequence[tuple[int, int]], kind: str = "layers", layers: int = 4, vocab: int = 64
) -> Any:
    """[kept, peak] activation bytes of one rank for each (tokens, recomputed layers)."""
    model = TinyModel(layers=layers, hidden=64, vocab=vocab, dtype=torch.float32)
    model.layers = nn.ModuleList(CoreLayer(x) for x in model.layers if isinstance(x, TinyLayer))
    wrap_layers(model.layers, attention="core")
    found = []
    for tokens, level in points:
        ctx = local_context([tokens // 2, tokens - tokens // 2])
        ctx.placement = replace(ctx.placement, recompute=level, recompute_kind=kind)
        ids = torch.zeros(tokens, dtype=torch.int64)

        def forward(ctx: PlacementContext = ctx, ids: Tensor = ids) -> Tensor:
            with use_placement(ctx):
                logits = model(ids, ctx.position_ids)
            return weighted_loss_sum(logits, ids, torch.ones(len(ids)))

        found.append(list(live_bytes(model, forward)))
    return found


class SavedBytes:
    """Bytes of the distinct storages that autograd keeps, parameters left out."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self._seen: dict[int, int] = {}

    def pack(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in self._own:
            self._seen[storage.data_ptr()] = storage.nbytes()
        return x

    @property
    def total(self) -> int:
        return sum(self._seen.values())


def recompute_case(
    *,
    recompute: int,
    kind: str = "layers",
    lengths: list[int],
    scheme: str = "local",
    inner: int = 1,
    layers: int = 4,
    seed: int = 0,
) -> dict[str, Any]:
    """Gradients and kept bytes of one placement with a recompute level."""
    world = cached_world()
    ctx = block_context(world, lengths, scheme, inner)
    ctx.placement = replace(ctx.placement, recompute=recompute, recompute_kind=kind)
    model = TinyModel(layers=layers, seed=seed)
    calls = {"qkv": [0] * layers, "proj": [0] * layers}
    for i, layer in enumerate(model.layers):
        for part, count in calls.items():
            module = layer.get_submodule(part)
            module.register_forward_pre_hook(lambda *_, i=i, c=count: c.__setitem__(i, c[i] + 1))
    wrap_layers(model.layers, attention="proj")
    saved = SavedBytes(model)
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 64, (ctx.rows,), generator=g)
    labels = torch.randint(0, 64, (ctx.rows,), generator=g)
    with use_placement(ctx), torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda x: x):
        loss = weighted_loss_sum(model(ids, ctx.position_ids), labels, torch.ones(ctx.rows))
    kept = saved.total
    torch.autograd.backward(loss)  # no placement is current here: recomputation brings its own
    return {
        "kept": kept,
        "calls": calls,
        "tokens": ctx.tokens,
        "gradient": [float(p.grad.sum()) for p in model.parameters() if p.grad is not None],
    }
