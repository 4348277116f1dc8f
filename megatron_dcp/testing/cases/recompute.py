"""Recompute levels: bytes kept for backward, counted, and what ran twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_dcp.dist import use_placement
from megatron_dcp.runtime.recompute import wrap_layers
from megatron_dcp.testing.cases.attention import block_context, cached_world
from megatron_dcp.testing.models import TinyModel, weighted_loss_sum


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
