"""The registry of schemes: one name, one file, one signature.

    scheme(q, k, v, ctx, options) -> out

q [t, H, D], k and v [t, Hk, D]: the local shards of a placement's pack, t = ctx.tokens (may be 0);
out [t, H, D] in q's dtype. A scheme runs the collectives of its block in one fixed order and gives
gradients by autograd. `ctx` says who holds what; nothing else may be read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch import Tensor

from megatron_dcp.dist import PlacementContext
from megatron_dcp.errors import PlanError
from megatron_dcp.schemes.dropout import Dropout
from megatron_dcp.schemes.masks import Mask


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """What one attention call asks for. softmax_scale None is D ** -0.5; softcap 0 is off.

    dropout: of the probabilities, None is off.
    """

    mask: Mask = field(default_factory=Mask)
    softmax_scale: float | None = None
    softcap: float = 0.0
    dropout: Dropout | None = None

    def from_head(self, head: int) -> AttentionOptions:
        """The same for a slice of the query heads that begins at `head`."""
        if self.dropout is None or not head:
            return self
        return replace(self, dropout=self.dropout.from_head(head))


Scheme = Callable[[Tensor, Tensor, Tensor, PlacementContext, AttentionOptions], Tensor]

_SCHEMES: dict[str, Scheme] = {}


def register_scheme(name: str) -> Callable[[Scheme], Scheme]:
    """Register a scheme under the name that plans use."""

    def add(scheme: Scheme) -> Scheme:
        if name in _SCHEMES:
            raise ValueError(f"scheme {name!r} registered twice")
        _SCHEMES[name] = scheme
        return scheme

    return add


def scheme_names() -> list[str]:
    """Registered names, in the order of registration."""
    return list(_SCHEMES)


def find_scheme(name: str) -> Scheme:
    """The scheme of a placement."""
    try:
        return _SCHEMES[name]
    except KeyError:
        raise PlanError(f"scheme {name!r} asked, this runtime has {', '.join(_SCHEMES)}") from None
