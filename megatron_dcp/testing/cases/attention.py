"""One placement's attention over a block against dense attention on one process, float64."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dcp.dist import DataWorld, PlacementContext, make_context
from megatron_dcp.plan import Placement
from megatron_dcp.plan.shards import Span
from megatron_dcp.schemes import attention
from megatron_dcp.testing.gradients import gradient_error
from megatron_dcp.testing.reference import dense_attention, visible

_world: list[tuple[Any, DataWorld]] = []


def cached_world() -> DataWorld:
    """One DataWorld per process group of this worker."""
    # The group itself is kept: the id of a destroyed one may come again.
    if not _world or _world[0][0] is not dist.group.WORLD:
        _world[:] = [(dist.group.WORLD, DataWorld(timeout_s=90))]
    return _world[0][1]


def take(x: Tensor, spans: tuple[Span, ...], starts: list[int]) -> Tensor:
    """The local rows of a pack's tensor [T, ...]."""
    parts = [x[starts[s.sample] + s.start : starts[s.sample] + s.stop] for s in spans]
    return torch.cat([x[:0], *parts])


def inner_blocks(first_rank: int, degree: int, inner: int) -> list[tuple[int, int]]:
    """The all-to-all blocks of a placement: (first rank, size)."""
    return [(first_rank + o * inner, inner) for o in range(degree // inner)]


def block_context(
    world: DataWorld,
    lengths: list[int],
    scheme: str,
    inner: int,
    documents: list[list[int]] | None = None,
    prefix: list[int] | None = None,
    degree: int | None = None,
    first_rank: int = 0,
) -> PlacementContext:
    """A placement of all ranks of the world, or of `degree` of them whose groups are there."""
    degree = degree or world.size
    world.ensure_groups(inner_blocks(first_rank, degree, inner))
    placement = Placement(
        slot=0,
        first_rank=first_rank,
        degree=degree,
        samples=tuple(range(len(lengths))),
        scheme=scheme,
        inner_degree=inner,
    )
    return make_context(world, placement, lengths, documents=documents, prefix=prefix)


def scheme_error(
    *,
    lengths: list[int],
    scheme: str,
    inner: int = 1,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 8,
    seed: int = 0,
    documents: list[list[int]] | None = None,
    prefix: list[int] | None = None,
    dtype: str = "float64",
    softcap: float = 0.0,
    degree: int | None = None,
    first_rank: int = 0,
    **mask: Any,
) -> dict[str, Any] | None:
    """Errors of out, dq, dk, dv of the local shard, and the bytes this rank sent.

    degree, first_rank: a block of fewer ranks than the world; the others give None. squares: per
    tensor the sums of squares of the error and of the reference.
    """
    world = cached_world()
    degree = degree or world.size
    world.ensure_groups(inner_blocks(first_rank, degree, inner))  # by the others as well
    if not first_rank <= world.rank < first_rank + degree:
        return None
    ctx = block_context(world, lengths, scheme, inner, documents, prefix, degree, first_rank)
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    shape = {"q": heads, "k": kv_heads, "v": kv_heads, "dout": heads}
    kind = getattr(torch, dtype)
    whole = {
        n: torch.randn(total, h, dim, generator=generator, dtype=torch.float64).to(kind)
        for n, h in shape.items()
    }
    if "window_size" in mask:
        mask["window_size"] = tuple(mask["window_size"])
    reference = _reference(whole, lengths, documents, prefix, softcap, mask)
    starts = [sum(lengths[:j]) for j in range(len(lengths))]
    spans = ctx.shards.ranks[ctx.block_rank]
    local = {n: take(x, spans, starts).requires_grad_(n != "dout") for n, x in whole.items()}
    before = dict(world.wire.sent)
    if ctx.filler:
        for n, x in local.items():
            local[n] = torch.ones(1, *x.shape[1:], dtype=kind).requires_grad_(n != "dout")
    out = attention(local["q"], local["k"], local["v"], placement=ctx, softcap=softcap, **mask)
    torch.autograd.backward(out, local["dout"])
    sent = {k: n - before.get(k, 0) for k, n in world.wire.sent.items() if n != before.get(k, 0)}
    found = {"out": out.detach()}
    found |= {f"d{n}": _grad(local[n]) for n in ("q", "k", "v")}
    mine = {n: take(x, spans, starts) for n, x in reference.items()}
    if ctx.filler:
        mine = {n: torch.zeros(1, *x.shape[1:], dtype=x.dtype) for n, x in mine.items()}
    error, where = gradient_error({n: x.double() for n, x in found.items()}, mine)
    squares = {n: [_squares(found[n].double() - x), _squares(x)] for n, x in mine.items()}
    return {
        "error": error,
        "where": where,
        "squares": squares,
        "tokens": ctx.tokens,
        "sent": sent,
    }


def _squares(x: Tensor) -> float:
    return float(x.square().sum())


def _grad(x: Tensor) -> Tensor:
    return x.grad if x.grad is not None else torch.zeros_like(x)


def _reference(
    whole: dict[str, Tensor],
    lengths: list[int],
    documents: list[list[int]] | None,
    prefix: list[int] | None,
    softcap: float,
    mask: dict[str, Any],
) -> dict[str, Tensor]:
    q, k, v = (whole[n].double().clone().requires_grad_() for n in "qkv")
    outs, at = [], 0
    for j, n in enumerate(lengths):
        see = visible(
            n,
            documents=documents[j] if documents else None,
            prefix=prefix[j] if prefix else 0,
            **mask,
        )
        rows = slice(at, at + n)
        outs.append(dense_attention(q[rows], k[rows], v[rows], see, softcap=softcap))
        at += n
    out = torch.cat(outs)
    torch.autograd.backward(out, whole["dout"].double())
    return {"out": out.detach()} | {
        f"d{n}": _grad(x) for n, x in zip("qkv", (q, k, v), strict=True)
    }
