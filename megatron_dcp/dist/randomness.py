"""Which numbers dropout draws now: the seed in force and the number of the call in this forward.

Kept beside the current placement because attention, below the runtime, draws with it too. One per
process: recomputation in autograd's threads sets it again (see `runtime.rng`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron_dcp.dist.context import PlacementContext

_SITE = "dropout_site"  # in PlacementContext.cache: dropouts drawn so far in this forward
_seed: list[int | None] = [None]


def dropout_seed() -> int | None:
    """The seed of `sample_dropout`, or None while it is off."""
    return _seed[0]


@contextmanager
def use_dropout_seed(seed: int) -> Iterator[None]:
    before = _seed[0]
    _seed[0] = seed
    try:
        yield
    finally:
        _seed[0] = before


def dropout_site(context: PlacementContext) -> int:
    """The site that the next dropout of this forward will have."""
    site: int = context.cache.get(_SITE, 0)
    return site


def set_dropout_site(context: PlacementContext, site: int) -> None:
    context.cache[_SITE] = site


def next_dropout_site(context: PlacementContext) -> int:
    """The site of a dropout that is drawn now."""
    site = dropout_site(context)
    set_dropout_site(context, site + 1)
    return site
