"""Attention over the grid of videos: the sharded dimension is switched, heads are never cut.

Spatial attention runs inside each frame, temporal attention along each pixel. Either is local where
whole frames, or whole pixel columns, sit on one rank; between the two one all-to-all of the rows
changes which (the idea of dynamic sequence parallelism, Zhao et al., 2024). A layout says who holds
which tokens of the pack:

    own     the microbatch's own rows, by `plan/shards.py`: what embedding, noise and loss see
    space   every frame whole on one rank; rows in the order of the pack
    time    every pixel's frames whole on one rank; rows pixel by pixel, frames ascending

Invariants: a token is on exactly one rank in each layout; a switch moves rows and computes nothing,
so it is exact and its backward is the switch back. Any degree, numbers of frames and of pixels are
legal, also fewer frames than ranks: then some ranks hold no row. Placements of every scheme run it
alike: over the all-to-all group where the block has one (`ulysses`), else by messages.

Shape legend: n local rows of a layout, T tokens of the pack, H heads, Hk KV heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_dcp.dist import PlacementContext, current_placement
from megatron_dcp.dist.context import cu_seqlens_of
from megatron_dcp.errors import ConfigError
from megatron_dcp.ops import varlen_attention
from megatron_dcp.schemes.registry import AttentionOptions

Axis = Literal["space", "time"]
Layout = Literal["own", "space", "time"]
Ints = NDArray[np.int64]
_CURRENT = "grid layout now"  # in PlacementContext.cache


class GridRows(NamedTuple):
    """Local rows of a layout: sample_index [n] (0..B-1), position_ids [n] inside the sample."""

    sample_index: Tensor
    position_ids: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """order [T]: token ids (rows of the pack), rank after rank; bounds [d + 1]: where each rank's
    begin; lengths: of the sequences (frames or pixel columns) in that order, [] for `own`."""

    order: Ints
    bounds: Ints
    lengths: Ints

    def of_rank(self, rank: int) -> Ints:
        return self.order[self.bounds[rank] : self.bounds[rank + 1]]

    def places(self) -> Ints:
        """[T]: where each token stands in `order`."""
        out = np.empty_like(self.order)
        out[self.order] = np.arange(len(self.order))
        return out

    def lengths_of(self, rank: int) -> list[int]:
        ends = np.cumsum(self.lengths)
        first, last = np.searchsorted(ends, self.bounds[rank : rank + 2], side="right")
        return [int(n) for n in self.lengths[first:last]]


def _layout(ctx: PlacementContext, name: str) -> _Layout:
    """A layout of the placement, kept in the context."""
    key = ("grid layout", name)
    if key not in ctx.cache:
        ctx.cache[key] = _own(ctx) if name == "own" else _by_axis(ctx, name)
    found: _Layout = ctx.cache[key]
    return found


def _own(ctx: PlacementContext) -> _Layout:
    starts = [0, *accumulate(ctx.lengths)]
    ids = [
        np.arange(starts[s.sample] + s.start, starts[s.sample] + s.stop)
        for spans in ctx.shards.ranks
        for s in spans
    ]
    bounds = np.array([0, *accumulate(ctx.shards.tokens)])
    return _Layout(order=np.concatenate(ids), bounds=bounds, lengths=np.zeros(0, dtype=np.int64))


def _by_axis(ctx: PlacementContext, axis: str) -> _Layout:
    """Whole sequences to ranks: one whose middle lies at m of T tokens goes to rank m * d // T."""
    if ctx.shapes is None:
        raise ConfigError(
            f"axis {axis!r} asked, this microbatch has no shapes; pass shapes= (frames, height, "
            "width of every sample) to engine.dataloader, or to mdcp.packed"
        )
    if axis not in ("space", "time"):
        raise ConfigError(f"axis {axis!r}: use 'space' (inside frames) or 'time' (along pixels)")
    orders, lengths, start = [], [], 0
    for frames, height, width in ctx.shapes:
        area = height * width
        ids = np.arange(start, start + frames * area).reshape(frames, area)
        ids = ids if axis == "space" else ids.T
        orders.append(ids.ravel())
        lengths.append(np.full(ids.shape[0], ids.shape[1]))
        start += frames * area
    sizes = np.concatenate(lengths)
    ends = np.cumsum(sizes)
    owners = (2 * ends - sizes) * ctx.degree // (2 * start)  # ascending
    last = np.searchsorted(owners, np.arange(ctx.degree), side="right")  # sequences up to a rank
    bounds = np.concatenate(([0], np.concatenate(([0], ends))[last]))
    return _Layout(order=np.concatenate(orders), bounds=bounds, lengths=sizes)


class _Switch(NamedTuple):
    """send [n]: rows to send, by receiver; place [m]: what arrived, by its place in the target;
    send_rows, receive_rows: counts to and from every rank of the block."""

    send: Tensor
    place: Tensor
    send_rows: list[int]
    receive_rows: list[int]


def _switch(ctx: PlacementContext, source: str, target: str) -> _Switch:
    key = ("grid switch", source, target)
    if key not in ctx.cache:
        a, b = _layout(ctx, source), _layout(ctx, target)
        going = b.places()[a.of_rank(ctx.block_rank)]
        coming = a.places()[b.of_rank(ctx.block_rank)]
        send = np.argsort(going)  # by receiver, in the order in which it holds them
        senders = np.searchsorted(a.bounds, coming, side="right") - 1
        arriving = np.argsort(senders, kind="stable")
        place = np.empty_like(arriving)
        place[arriving] = np.arange(len(arriving))
        receivers = np.searchsorted(b.bounds, going, side="right") - 1
        device = ctx.world.device
        ctx.cache[key] = _Switch(
            send=torch.from_numpy(send).to(device),
            place=torch.from_numpy(place).to(device),
            send_rows=np.bincount(receivers, minlength=ctx.degree).tolist(),
            receive_rows=np.bincount(senders, minlength=ctx.degree).tolist(),
        )
    found: _Switch = ctx.cache[key]
    return found


def _move(x: Tensor, ctx: PlacementContext, source: str, target: str, kind: str) -> Tensor:
    """Rows of one layout [n, ...] as those of another; an empty shard's filler comes and goes."""
    switch = _switch(ctx, source, target)
    send = x[: len(switch.send)].index_select(0, switch.send)
    arrived = send.new_empty((len(switch.place), *x.shape[1:]))
    if ctx.degree == 1:
        arrived = send
    elif ctx.inner == ctx.degree:
        group = ctx.inner_group()
        ctx.world.wire.all_to_all(arrived, send, switch.receive_rows, switch.send_rows, group, kind)
    else:
        _exchange(send, arrived, switch, ctx, kind)
    out = arrived.index_select(0, switch.place)
    if target == "own" and ctx.filler:
        return out.new_zeros((1, *x.shape[1:]))
    return out


def _exchange(
    send: Tensor, arrived: Tensor, switch: _Switch, ctx: PlacementContext, kind: str
) -> None:
    """The same all-to-all by messages, for blocks that have no group of their own."""
    me, first = ctx.block_rank, ctx.placement.first_rank
    out = torch.split(send, switch.send_rows)
    into = torch.split(arrived, switch.receive_rows)
    peers = [r for r in range(ctx.degree) if r != me]
    pending = ctx.world.wire.start_exchange(
        [(out[r], first + r) for r in peers],
        [(into[r], first + r) for r in peers],
        ctx.world.group,
        kind,
    )
    into[me].copy_(out[me])
    pending.wait()


class _SwitchRows(torch.autograd.Function):
    @staticmethod
    def forward(fn: Any, x: Tensor, ctx: PlacementContext, source: str, target: str) -> Tensor:
        fn.placement, fn.source, fn.target = ctx, source, target
        return _move(x, ctx, source, target, "grid")

    @staticmethod
    @once_differentiable
    def backward(fn: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        back = _move(grad.contiguous(), fn.placement, fn.target, fn.source, "grid.backward")
        return back, None, None, None


def switch_rows(
    x: Tensor, *, source: Layout, target: Layout, placement: PlacementContext | None = None
) -> Tensor:
    """Rows x [n, ...] of one layout of the microbatch as rows of another; differentiable, exact.

    source, target: `own`, `space` or `time` (see the module docstring). A rank may get 0 rows in
    `space` and `time`; in `own` it then has one filler row, which comes back as zeros. Collective
    over the block: all its ranks switch alike, and x requires a gradient on all of them or on none.
    """
    ctx = placement if placement is not None else current_placement()
    rows = layout_rows(ctx, source)
    if x.shape[0] != rows:
        raise ConfigError(
            f"switch_rows from {source!r} to {target!r}: {x.shape[0]} rows given, this rank holds "
            f"{rows} in that layout"
        )
    set_current_layout(ctx, target)
    if source == target:
        return x
    out: Tensor = _SwitchRows.apply(x, ctx, source, target)  # type: ignore[no-untyped-call]
    return out


def current_layout(ctx: PlacementContext) -> Layout:
    """The layout that the last switch of this forward left: which tokens a hidden row is."""
    layout: Layout = ctx.cache.get(_CURRENT, "own")
    return layout


def set_current_layout(ctx: PlacementContext, layout: Layout) -> None:
    ctx.cache[_CURRENT] = layout


def layout_rows(ctx: PlacementContext, layout: str) -> int:
    """Rows of this rank in a layout."""
    if layout == "own":
        return ctx.rows
    return len(_layout(ctx, layout).of_rank(ctx.block_rank))


def grid_rows(layout: Layout, *, placement: PlacementContext | None = None) -> GridRows:
    """Which tokens this rank's rows of a layout are; nothing is sent."""
    ctx = placement if placement is not None else current_placement()
    if layout == "own":
        return GridRows(ctx.sample_index, ctx.position_ids)
    ids = torch.from_numpy(_layout(ctx, layout).of_rank(ctx.block_rank)).to(ctx.world.device)
    starts = ctx.cu_seqlens.to(torch.int64)
    sample = torch.searchsorted(starts, ids, right=True) - 1
    return GridRows(sample, ids - starts[sample])


def grid_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ctx: PlacementContext,
    options: AttentionOptions,
    *,
    axis: Axis,
    rows: Layout,
) -> Tensor:
    """q [n, H, D], k and v [n, Hk, D], rows of layout `rows` -> [n, H, D] of the same layout.

    Rows of another layout than the axis are moved there and back, q, k and v in one message; a
    model that moves its hidden rows instead (`switch_rows`) sends a quarter of that or less.
    """
    if ctx.documents is not None or ctx.prefix is not None:
        raise ConfigError(f"attention over axis {axis!r} knows no documents and no prefix")
    if rows != axis:
        heads = [q.shape[1], k.shape[1], v.shape[1]]
        moved = switch_rows(torch.cat((q, k, v), dim=1), source=rows, target=axis, placement=ctx)
        q, k, v = torch.split(moved, heads, dim=1)
    out = _attend(q, k, v, ctx, options, axis)
    return switch_rows(out, source=axis, target=rows, placement=ctx)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, ctx: PlacementContext, options: AttentionOptions, axis: str
) -> Tensor:
    if not q.shape[0]:
        return q + 0.0 * (k.sum() + v.sum())  # no row; the graph still reaches all three
    key = ("grid sequences", axis)
    if key not in ctx.cache:
        lengths = _layout(ctx, axis).lengths_of(ctx.block_rank)
        ctx.cache[key] = (cu_seqlens_of(lengths).to(ctx.world.device), max(lengths))
    cu_seqlens, longest = ctx.cache[key]
    out, _ = varlen_attention(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        longest,
        longest,
        softmax_scale=options.softmax_scale,
        causal=options.mask.causal,
        window_size=options.mask.window_size,
        softcap=options.softcap,
    )
    return out
