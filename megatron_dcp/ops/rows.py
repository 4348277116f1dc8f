"""Row-wise ops: merge of partial attention results, RoPE from positions, cross-entropy.

Shape legend: T tokens, H heads, D head dim, V vocabulary, R rotated dims.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megatron_dcp.ops._register import autograd, fake, once_differentiable

_ops = torch.ops.megatron_dcp


def merge_lse(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Join two partial softmaxes over different keys; differentiable in all four.

    out [T, H, D], one dtype; lse [H, T], natural log, in the accumulation type (float32; float64
    for float64). A part with lse -inf counts nothing, whatever its out holds; two of them give
    out 0 and lse -inf.
    """
    out, lse = _ops.merge_lse(_unit(out_a), lse_a, _unit(out_b), lse_b)
    return out, lse


def rope(
    x: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    *,
    scale: float = 1.0,
    interleaved: bool = False,
) -> Tensor:
    """Rotate the first 2 * len(frequencies) dims of x [T, H, D] by positions[t] * frequencies[i].

    positions int64 [T]: the position of each token inside its sample, wherever the token lives;
    rank arithmetic never enters. frequencies float64 [R / 2], radians per position, from
    `rope_frequencies` and friends. Pair i is (x[i], x[i + R / 2]), or with `interleaved`
    (x[2 i], x[2 i + 1]). `scale` multiplies cos and sin (YaRN). Further dims are copied.
    """
    out: Tensor = _ops.rope(_unit(x), positions, frequencies, scale=scale, interleaved=interleaved)
    return out


def rope_frequencies(rotated: int, base: float = 10000.0) -> Tensor:
    """float64 [rotated / 2]: base ** (-2 i / rotated) (Su et al., RoFormer)."""
    if rotated <= 0 or rotated % 2:
        raise ValueError(f"RoPE rotates an even, positive number of dims; got {rotated}.")
    return base ** (-torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)


def ntk_frequencies(rotated: int, factor: float, base: float = 10000.0) -> Tensor:
    """NTK-aware scaling: the base grows so that the slowest frequency shrinks by `factor`."""
    if rotated <= 2:
        raise ValueError(f"NTK scaling needs more than 2 rotated dims; got {rotated}.")
    return rope_frequencies(rotated, base * factor ** (rotated / (rotated - 2)))


def yarn_frequencies(
    rotated: int,
    factor: float,
    original_positions: int,
    base: float = 10000.0,
    *,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
) -> tuple[Tensor, float]:
    """YaRN (Peng et al., 2023): frequencies and the scale of cos and sin.

    Dims that turn more than `beta_fast` times within `original_positions` keep their frequency,
    those below `beta_slow` turns are divided by `factor`, those between are blended.
    """
    plain = rope_frequencies(rotated, base)

    def dim_of(turns: float) -> float:
        return rotated * math.log(original_positions / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(dim_of(beta_fast)), 0)
    high = min(math.ceil(dim_of(beta_slow)), rotated - 1)
    span = max(high - low, 1e-3)
    stretched = ((torch.arange(rotated // 2, dtype=torch.float64) - low) / span).clamp(0, 1)
    scale = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return plain * (1 - stretched) + plain / factor * stretched, scale


def cross_entropy(
    logits: Tensor, labels: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Sum over tokens of weight * (lse - logit of the label); differentiable in the logits.

    logits [T, V]; labels int64 [T], negative for tokens that do not count; weights [T] in the
    accumulation type (default 1), without gradient. The vocabulary is walked in chunks; no [T, V]
    intermediate exists, forward or backward, except the gradient itself.

    Returns the loss (scalar) and lse [T], both in the accumulation type; lse is differentiable
    too (z-loss). Raises ValueError when weights require a gradient.
    """
    if weights is not None and weights.requires_grad:
        raise ValueError(
            "cross_entropy has no gradient for its weights, and the given ones require one. "
            "Pass weights.detach(), or multiply per-token losses yourself."
        )
    loss, lse = _ops.cross_entropy(_unit(logits), labels, weights)
    return loss, lse


def _unit(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _accumulation(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _dense(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _fake_cross_entropy(
    logits: Tensor, labels: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    dtype = _accumulation(logits)
    return logits.new_empty((), dtype=dtype), logits.new_empty((logits.shape[0],), dtype=dtype)


fake("merge_lse", lambda out_a, lse_a, out_b, lse_b: (_dense(out_a), _dense(lse_a)))
fake(
    "merge_lse_grad",
    lambda dout, out_a, lse_a, out_b, lse_b, dlse=None: tuple(
        _dense(x) for x in (out_a, lse_a, out_b, lse_b)
    ),
)
fake(
    "rope",
    lambda x, positions, frequencies, *, scale=1.0, interleaved=False, inverse=False: _dense(x),
)
fake("cross_entropy", _fake_cross_entropy)
fake(
    "cross_entropy_grad",
    lambda dloss, logits, labels, lse, weights=None, dlse=None: _dense(logits),
)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)
    ctx.set_materialize_grads(False)


def _merge_backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    out_a, lse_a, out_b, lse_b = ctx.saved_tensors
    if dout is None and dlse is None:
        return None, None, None, None
    dout = torch.zeros_like(out_a) if dout is None else _unit(dout)
    grads: tuple[Any, ...] = _ops.merge_lse_grad(dout, out_a, lse_a, out_b, lse_b, dlse)
    return tuple(grads)


def _save_rope(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any
) -> None:
    ctx.save_for_backward(*inputs[1:])
    ctx.options = dict(keyword_only_inputs)


def _rope_backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    # The transpose of a rotation is the rotation back; the scale stays.
    options = ctx.options | {"inverse": not ctx.options["inverse"]}
    return _ops.rope(_unit(g), *ctx.saved_tensors, **options), None, None


def _save_cross_entropy(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    logits, labels, weights = inputs
    ctx.save_for_backward(logits, labels, weights, output[1])
    ctx.set_materialize_grads(False)


def _cross_entropy_backward(ctx: Any, dloss: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    logits, labels, weights, lse = ctx.saved_tensors
    if dloss is None and dlse is None:
        return None, None, None
    dloss = lse.new_zeros(()) if dloss is None else dloss
    dlse = None if dlse is None else dlse.contiguous()
    return _ops.cross_entropy_grad(dloss, logits, labels, lse, weights, dlse), None, None


autograd("merge_lse", _merge_backward, _save_inputs)
once_differentiable("merge_lse_grad")
autograd("rope", _rope_backward, _save_rope)
autograd("cross_entropy", _cross_entropy_backward, _save_cross_entropy)
once_differentiable("cross_entropy_grad")
