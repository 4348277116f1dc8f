"""`mdcp.attention`: the one call that makes a model plan-aware."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from megatron_dcp.dist import PlacementContext, current_placement
from megatron_dcp.dist.randomness import dropout_seed, next_dropout_site
from megatron_dcp.errors import ConfigError
from megatron_dcp.ops import make_rng_key
from megatron_dcp.schemes.dropout import Dropout
from megatron_dcp.schemes.grid import Axis, Layout, grid_attention, layout_rows
from megatron_dcp.schemes.masks import Mask
from megatron_dcp.schemes.registry import AttentionOptions, find_scheme


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    head_offset: int = 0,
    axis: Axis | None = None,
    rows: Layout = "own",
    placement: PlacementContext | None = None,
) -> Tensor:
    """Attention of the current microbatch, over whatever ranks its placement spans.

    q [t, H, D], k and v [t, Hk, D] (H a multiple of Hk), also with a leading batch dimension of 1:
    the local rows of the packed microbatch, after RoPE by the microbatch's `position_ids`.
    Returns out of q's shape and dtype. Samples never see each other; documents and prefixes of
    samples follow the microbatch.

    causal, window_size: as in flash-attention; the window counts (left, right) from the query's own
    position, -1 is no limit. softmax_scale: default D ** -0.5. softcap: 0 is off.
    dropout_p: of attention probabilities, inside `with mdcp.sample_dropout(seed)`: masks belong to
    the sample, so plans change nothing; pass 0 in evaluation. head_offset: number of the first
    query head given here in the whole model, where tensor parallelism cuts heads (for dropout).
    axis: for samples with shapes, `space` (inside each frame) or `time` (along each pixel) instead
    of the whole sample; causal and window then count inside that. rows: the layout that q, k and v
    are in (see `schemes.grid`); only with an axis. placement: default the current one.
    """
    ctx = placement if placement is not None else current_placement()
    return _eager()(
        q,
        k,
        v,
        ctx,
        AttentionOptions(
            mask=Mask(causal=causal, window_size=window_size),
            softmax_scale=softmax_scale,
            softcap=softcap,
            dropout=_dropout(dropout_p, head_offset, ctx),
        ),
        axis,
        rows,
    )


def _dropout(probability: float, head_offset: int, ctx: PlacementContext) -> Dropout | None:
    if not probability:
        return None
    if not 0.0 < probability < 1.0:
        raise ConfigError(f"attention: dropout_p={probability!r} must be at least 0 and below 1")
    seed = dropout_seed()
    if seed is None:
        raise ConfigError(
            f"attention: dropout_p={probability} outside of mdcp.sample_dropout: wrap the forward "
            "of every microbatch in `with mdcp.sample_dropout(seed):`, so that masks belong to "
            "samples and not to ranks"
        )
    key = make_rng_key(seed, next_dropout_site(ctx), ctx.step)
    return Dropout(probability=probability, rng_key=key, head_offset=head_offset)


# torch.compile breaks its graph here: what a placement asks for changes with every microbatch and
# crosses ranks. The mark is read where a caller is traced; nothing else looks at it.
attention._torchdynamo_disable = True  # type: ignore[attr-defined]

_disabled: list[Callable[..., Tensor]] = []


def _eager() -> Callable[..., Tensor]:
    """The attention that runs, kept out of torch.compile where that is in use (it loads slowly)."""
    if "torch._dynamo" not in sys.modules:
        return _attention
    if not _disabled:
        _disabled.append(torch.compiler.disable(_attention))  # type: ignore[no-untyped-call]
    return _disabled[0]


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ctx: PlacementContext,
    options: AttentionOptions,
    axis: Axis | None = None,
    rows: Layout = "own",
) -> Tensor:
    if q.dim() == 4 and q.shape[0] == 1:
        return _attention(q[0], k[0], v[0], ctx, options, axis, rows).unsqueeze(0)
    ctx.attended = True
    if ctx.padded and not options.mask.causal:
        raise ConfigError(
            "attention: causal=False on samples that shape_quantum pads: their tokens would see "
            "the padding. Leave shape_quantum out of engine.dataloader, or pass causal=True"
        )
    if axis is None and rows != "own":
        raise ConfigError(f"attention: rows={rows!r} belongs to axis 'space' or 'time'; pass axis")
    _check(q, k, v, ctx, ctx.rows if axis is None else layout_rows(ctx, rows))
    if axis is not None:
        if options.dropout is not None:
            raise ConfigError(f"attention: dropout_p with axis={axis!r} is not supported; pass 0")
        return grid_attention(q, k, v, ctx, options, axis=axis, rows=rows)
    scheme = find_scheme(ctx.placement.scheme)
    if ctx.filler:
        out = scheme(q[:0], k[:0], v[:0], ctx, options)
        return torch.cat((out, q * 0.0))
    return scheme(q, k, v, ctx, options)


def _check(q: Tensor, k: Tensor, v: Tensor, ctx: PlacementContext, rows: int) -> None:
    if q.dim() != 3 or k.dim() != 3 or v.shape != k.shape:
        raise ConfigError(
            f"attention: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}; pass "
            "[tokens, heads, head_dim], k and v alike"
        )
    if q.shape[0] != rows or k.shape[0] != rows:
        raise ConfigError(
            f"attention: {q.shape[0]} query and {k.shape[0]} key rows, this rank holds "
            f"{rows} rows of the placement (slot {ctx.placement.slot}, ranks "
            f"{ctx.placement.first_rank}..{ctx.placement.first_rank + ctx.degree - 1}); pass the "
            "microbatch's tokens unpadded, from the microbatch that is current"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ConfigError(
            f"attention: q is {q.dtype}, k {k.dtype}, v {v.dtype}; pass one dtype (RoPE in float32 "
            "under autocast leaves v behind: cast q and k back)"
        )
    if not k.shape[1] or q.shape[1] % k.shape[1] or q.shape[2] != k.shape[2]:
        raise ConfigError(
            f"attention: {q.shape[1]} query heads and {k.shape[1]} KV heads of dims {q.shape[2]} "
            f"and {k.shape[2]}; query heads must be a multiple of KV heads, of equal dim"
        )
