"""Ops that move tokens and heads: zigzag partition, row gather/scatter, Ulysses buffers, padding.

Gather and scatter, pack and unpack, join and split are each other's adjoints, and so are their
gradients. Nothing here communicates; the schemes do.

Shape legend: T tokens, N rows, H query heads, Hk KV heads, D head dim, B samples, d degree.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_dcp.ops._register import autograd, fake

_ops = torch.ops.megatron_dcp


def zigzag_partition(
    cu_seqlens: Tensor, degree: int, total: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Deal packed samples to `degree` ranks so that causal work is balanced, without padding.

    A sample of L tokens is cut at floor(c * L / (2 * degree)), c = 0 .. 2 * degree; rank r holds
    chunks r and 2 * degree - 1 - r of every sample, in this order, sample after sample.

    cu_seqlens [B + 1] int32 or int64; total: rows of the packed tensors, default cu_seqlens[-1].

    Returns int64 tensors: index [total], the packed row of each place, rank after rank (-1 after
    the last); positions [total] inside the sample; cu_rank [degree, B + 1], each rank's own
    cu_seqlens. Rank r's places are cu_rank[:r, -1].sum() and the next cu_rank[r, -1].
    """
    rows = int(cu_seqlens[-1]) if total is None else total
    index, positions, cu_rank = _ops.zigzag_partition(cu_seqlens, degree, rows)
    return index, positions, cu_rank


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """out[i] = x[index[i]], zeros where index[i] is -1; x [N, ...], index int64 [M]."""
    out: Tensor = _ops.gather_rows(x.contiguous(), index)
    return out


def scatter_rows(x: Tensor, index: Tensor, rows: int) -> Tensor:
    """out[index[i]] += x[i] in the order of i, -1 skipped; x [M, ...] gives [rows, ...].

    The inverse of `gather_rows` with the same index when no row repeats.
    """
    out: Tensor = _ops.scatter_rows(x.contiguous(), index, rows)
    return out


def ulysses_pack(q: Tensor, k: Tensor, v: Tensor, degree: int) -> Tensor:
    """The send buffer of the head all-to-all: [d, T, H/d + 2 * kv, D], one block a destination.

    Block r holds, token by token, rank r's query heads, then its key heads, then its value heads.
    kv = Hk / d; with more ranks than KV heads kv = 1 and d / Hk neighbours receive the same head.
    Blocks are contiguous, so that ranks may hold different numbers of tokens. Afterwards the
    received [sum T, H/d + 2 * kv, D] is used by slicing its heads; no unpacking copy is needed.

    Raises RuntimeError unless d divides H, and d divides Hk or Hk divides d.
    """
    buffer: Tensor = _ops.ulysses_pack(_unit(q), _unit(k), _unit(v), degree)
    return buffer


def ulysses_unpack(buffer: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """The adjoint of `ulysses_pack`: q [T, H, D]; k, v [T, Hk, D], copies of a head added.

    With d <= Hk it is the inverse.
    """
    q, k, v = _ops.ulysses_unpack(buffer.contiguous(), heads, kv_heads)
    return q, k, v


def ulysses_join(x: Tensor) -> Tensor:
    """[d, T, h, D], one block a source, to [T, d * h, D]: the return of the head all-to-all."""
    out: Tensor = _ops.ulysses_join(x.contiguous())
    return out


def ulysses_split(x: Tensor, degree: int) -> Tensor:
    """[T, H, D] to [d, T, H / d, D]: the inverse of `ulysses_join`."""
    out: Tensor = _ops.ulysses_split(_unit(x), degree)
    return out


def zero_padding_(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Zero the rows of `x` [N, ...] beyond cu_seqlens[-1], in place; returns `x`.

    Differentiable: the gradient of these rows is 0.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        # Autograd sees nothing of what a kernel writes; this it records. The kernel still checks.
        padding = torch.arange(x.shape[0], device=x.device) >= cu_seqlens[-1].to(x.device)
        x.masked_fill_(padding.view(-1, *[1] * (x.dim() - 1)), 0)
    _ops.zero_padding_(x.detach(), cu_seqlens)
    return x


def _unit(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _fake_zigzag(cu_seqlens: Tensor, degree: int, total: int) -> tuple[Tensor, Tensor, Tensor]:
    index = cu_seqlens.new_empty((total,), dtype=torch.int64)
    cu_rank = cu_seqlens.new_empty((degree, cu_seqlens.shape[0]), dtype=torch.int64)
    return index, torch.empty_like(index), cu_rank


def _fake_unpack(buffer: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens, dim = buffer.shape[1], buffer.shape[3]
    q = buffer.new_empty((tokens, heads, dim))
    k = buffer.new_empty((tokens, kv_heads, dim))
    return q, k, torch.empty_like(k)


def _fake_pack(q: Tensor, k: Tensor, v: Tensor, degree: int) -> Tensor:
    width = q.shape[1] // degree + 2 * max(1, k.shape[1] // degree)
    return q.new_empty((degree, q.shape[0], width, q.shape[2]))


fake("zigzag_partition", _fake_zigzag)
fake("gather_rows", lambda x, index: x.new_empty((index.shape[0], *x.shape[1:])))
fake("scatter_rows", lambda x, index, rows: x.new_empty((rows, *x.shape[1:])))
fake("ulysses_pack", _fake_pack)
fake("ulysses_unpack", _fake_unpack)
fake("ulysses_join", lambda x: x.new_empty((x.shape[1], x.shape[0] * x.shape[2], x.shape[3])))
fake(
    "ulysses_split",
    lambda x, degree: x.new_empty((degree, x.shape[0], x.shape[1] // degree, x.shape[2])),
)
fake("zero_padding_", lambda x, cu_seqlens: None)


def _save_gather(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, index = inputs
    ctx.save_for_backward(index)
    ctx.rows = x.shape[0]


def _save_scatter(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(inputs[1])


def _save_pack(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.heads, ctx.kv_heads = inputs[0].shape[1], inputs[1].shape[1]


def _save_unpack(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.degree = inputs[0].shape[0]


autograd(
    "gather_rows",
    lambda ctx, g: (scatter_rows(g, ctx.saved_tensors[0], ctx.rows), None),
    _save_gather,
)
autograd(
    "scatter_rows", lambda ctx, g: (gather_rows(g, ctx.saved_tensors[0]), None, None), _save_scatter
)
autograd(
    "ulysses_pack",
    lambda ctx, g: (*ulysses_unpack(g, ctx.heads, ctx.kv_heads), None),
    _save_pack,
)
autograd(
    "ulysses_unpack",
    lambda ctx, q, k, v: (ulysses_pack(q, k, v, ctx.degree), None, None),
    _save_unpack,
)
autograd("ulysses_join", lambda ctx, g: ulysses_split(g, ctx.degree), _save_unpack)
autograd("ulysses_split", lambda ctx, g: (ulysses_join(g), None), lambda ctx, inputs, output: None)
