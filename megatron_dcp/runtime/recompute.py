"""Activation recomputation per microbatch: the first r layers recompute, r from the plan.

`wrap_layers` gives each layer a forward that asks the current placement for its `recompute`: layer
i of the list recomputes when i < recompute (non-reentrant `torch.utils.checkpoint`, random state
preserved). Nothing is rebuilt between microbatches, so switching costs nothing. A recomputed
forward runs under the placement with which it ran first, whatever is current then; the ranks of a
block recompute the same layers in the same order, so its collectives match.

The class of a layer is replaced by a subclass of it, which survives `copy.deepcopy` and keeps
`isinstance` checks true; state dicts do not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_dcp.dist import current_or_none, use_placement
from megatron_dcp.errors import ConfigError

_INDEX = "_mdcp_layer_index"
_wrapped: dict[type[nn.Module], type[nn.Module]] = {}


def _wrapped_class(cls: type[nn.Module]) -> type[nn.Module]:
    """A subclass of a layer's class whose forward recomputes when the placement says so."""
    if cls in _wrapped:
        return _wrapped[cls]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        plain = super(made, self).forward
        context = current_or_none()
        if (
            context is None
            or not torch.is_grad_enabled()
            or context.placement.recompute_kind != "layers"
            or getattr(self, _INDEX) >= context.placement.recompute
        ):
            return plain(*args, **kwargs)

        def under_its_placement(*inner: Any, **named: Any) -> Any:
            with use_placement(context):
                return plain(*inner, **named)

        return checkpoint(under_its_placement, *args, use_reentrant=False, **kwargs)

    made: type[nn.Module] = type(cls.__name__, (cls,), {"forward": forward})
    made.__module__, made.__qualname__ = cls.__module__, cls.__qualname__
    _wrapped[cls] = made
    return made


def wrap_layers(layers: Sequence[nn.Module] | nn.ModuleList) -> int:
    """Let the plan choose how many of these layers recompute; returns how many there are.

    layers: the transformer layers of this pipeline stage, in order. Wrapping twice changes nothing.
    """
    found = list(layers)
    if not found:
        raise ConfigError("wrap_layers got no layer; pass the list of transformer layers")
    for index, layer in enumerate(found):
        if not hasattr(layer, _INDEX):
            layer.__class__ = _wrapped_class(type(layer))
        setattr(layer, _INDEX, index)
    return len(found)


def find_layers(model: nn.Module) -> nn.ModuleList | None:
    """The longest ModuleList of layers of one class (the outermost on a tie), or None."""
    best: nn.ModuleList | None = None
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) > 1:
            alike = len({type(m) for m in module}) == 1
            if alike and (best is None or len(module) > len(best)):
                best = module
    return best


def is_wrapped(model: nn.Module) -> bool:
    """Whether any layer of a model follows the plan's recomputation."""
    return any(hasattr(m, _INDEX) for m in model.modules())
