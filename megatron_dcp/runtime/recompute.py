"""Activation recomputation per microbatch: the first r layers recompute, r from the plan.

`wrap_layers` gives each layer a forward that asks the current placement for its `recompute`: layer
i of the list recomputes when i < recompute (non-reentrant `torch.utils.checkpoint`, random state
preserved); with `recompute_kind` selective only its attention module does. Nothing is rebuilt
between microbatches, so switching costs nothing. A recomputed forward runs under the placement with
which it ran first, whatever is current then (in 1F1B another one may be); the ranks of a block
recompute the same layers in the same order, so its collectives match.

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
from megatron_dcp.plan import StepPlan
from megatron_dcp.runtime.rng import dropout_state, restored_dropout

_INDEX = "_mdcp_layer_index"
_KIND = "_mdcp_recompute_kind"
_wrapped: dict[type[nn.Module], type[nn.Module]] = {}


def _wrapped_class(cls: type[nn.Module]) -> type[nn.Module]:
    """A subclass of a module's class whose forward recomputes when the placement says so."""
    if cls in _wrapped:
        return _wrapped[cls]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        plain = super(made, self).forward
        context = current_or_none()
        if (
            context is None
            or not torch.is_grad_enabled()
            or context.placement.recompute_kind != getattr(self, _KIND)
            or getattr(self, _INDEX) >= context.placement.recompute
        ):
            return plain(*args, **kwargs)

        dropout = dropout_state()

        def under_its_placement(*inner: Any, **named: Any) -> Any:
            with use_placement(context), restored_dropout(dropout):
                return plain(*inner, **named)

        return checkpoint(under_its_placement, *args, use_reentrant=False, **kwargs)

    made: type[nn.Module] = type(cls.__name__, (cls,), {"forward": forward})
    made.__module__, made.__qualname__ = cls.__module__, cls.__qualname__
    _wrapped[cls] = made
    return made


def _wrap(module: nn.Module, index: int, kind: str) -> None:
    if not hasattr(module, _INDEX):
        module.__class__ = _wrapped_class(type(module))
    setattr(module, _INDEX, index)
    setattr(module, _KIND, kind)


def wrap_layers(
    layers: Sequence[nn.Module] | nn.ModuleList, *, attention: str | None = None
) -> int:
    """Let the plan choose how many of these layers recompute; returns how many there are.

    layers: the transformer layers of this pipeline stage, in order. attention: name of the
    attention module inside a layer, for plans of kind `selective`. Wrapping twice changes nothing.
    """
    found = list(layers)
    if not found:
        raise ConfigError("wrap_layers got no layer; pass the list of transformer layers")
    for index, layer in enumerate(found):
        _wrap(layer, index, "layers")
        if attention is None:
            continue
        try:
            part = layer.get_submodule(attention)
        except AttributeError:
            raise ConfigError(
                f"wrap_layers: layer {index} ({type(layer).__name__}) has no module {attention!r}; "
                f"it has {[n for n, _ in layer.named_children()]}"
            ) from None
        _wrap(part, index, "selective")
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


def wrapped_layers(model: nn.Module, kind: str = "layers") -> int:
    """How many layers of a model follow the plan's recomputation of a kind."""
    return sum(getattr(m, _KIND, None) == kind for m in model.modules())


def check_recompute(model: nn.Module, plan: StepPlan) -> None:
    """Refuse a plan that recomputes what the model cannot: its memory promise would be broken.

    Layers that nobody has wrapped are found and wrapped here.
    """
    for kind in ("layers", "selective"):
        most = max((p.recompute for p in plan.placements if p.recompute_kind == kind), default=0)
        if not most:
            continue
        have = wrapped_layers(model, kind)
        if not have and kind == "layers" and (layers := find_layers(model)) is not None:
            have = wrap_layers(layers)
        if not have:
            raise ConfigError(
                f"the plan recomputes {most} layers ({kind}) and {type(model).__name__} has none "
                "wrapped; call engine.wrap_layers(model.layers, attention='name of the attention "
                "module') or plan with recompute='off'"
            )
        if most > have:
            raise ConfigError(
                f"the plan recomputes {most} layers ({kind}), the model has {have} wrapped; use a "
                "cost profile of this model, or pass all its layers to engine.wrap_layers"
            )
