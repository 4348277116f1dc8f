"""Python face of the attention ops: defaults, fake implementations, autograd formulas.

The contract of each op stands in `megatron_dcp.ops`. The C++ side checks shapes, dtypes and
segment bounds and raises RuntimeError with what was asked and found.

Shape legend: T tokens, H query heads, Hk KV heads, D head dim, B sequences, S segments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_dcp.ops._register import autograd, fake, once_differentiable

_ops = torch.ops.megatron_dcp
_MASK64 = (1 << 64) - 1


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of lse, partial outputs and gradient accumulators for inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def new_accumulators(q: Tensor) -> tuple[Tensor, Tensor]:
    """The neutral running result of `q` [T, H, D]: out 0 [T, H, D] and lse -inf [H, T]."""
    dtype = accumulation_dtype(q.dtype)
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    lse = torch.full((q.shape[1], q.shape[0]), float("-inf"), dtype=dtype, device=q.device)
    return out, lse


def make_rng_key(seed: int, site: int, step: int = 0) -> int:
    """A signed 64-bit key from (seed, site, step): SplitMix64 (Steele et al., 2014) of each."""
    key = 0
    for part in (seed, site, step):
        z = (key ^ (part & _MASK64)) + 0x9E3779B97F4A7C15 & _MASK64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK64
        key = z ^ (z >> 31)
    return key - (1 << 64) if key >> 63 else key


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    rng_key: int = 0,
    sample_ids: Tensor | None = None,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
    head_offset: int = 0,
    deterministic: bool = True,
) -> tuple[Tensor, Tensor]:
    """Attention over packed sequences; differentiable through both results.

    q [total_q, H, D]; k, v [total_k, Hk, D]; cu_seqlens_q/k int32 or int64 [B + 1], starting at 0.
    Rows beyond cu_seqlens_q[-1] are padding: out 0, lse -inf, gradients 0.

    causal: row i of a sequence sees keys up to i + len_k - len_q (aligned to the bottom right).
    window_size: keys further left or right of that diagonal than (left, right) are hidden; -1 is
    no limit; with `causal` nothing is seen to the right.
    softcap: scores become softcap * tanh(score / softcap); 0 is off.
    softmax_scale: default D ** -0.5.
    max_seqlen_q/k are accepted for call compatibility; no kernel here needs them.
    deterministic: accepted for call compatibility; every CPU path is deterministic.

    Returns out [total_q, H, D] in q's dtype and lse [H, total_q] (natural log) in float32, or
    float64 for float64 inputs.
    """
    del max_seqlen_q, max_seqlen_k, deterministic
    left, right = window_size
    out, lse = _ops.varlen_attention(
        _unit_stride(q),
        _unit_stride(k),
        _unit_stride(v),
        cu_seqlens_q,
        cu_seqlens_k,
        sample_ids,
        q_positions,
        k_positions,
        softmax_scale=softmax_scale,
        causal=causal,
        window_left=left,
        window_right=right,
        softcap=softcap,
        dropout_p=dropout_p,
        rng_key=rng_key,
        head_offset=head_offset,
    )
    return out, lse


def segment_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Tensor,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    rng_key: int = 0,
    sample_ids: Tensor | None = None,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
    head_offset: int = 0,
) -> tuple[Tensor, Tensor]:
    """Attention over a segment list [S, 6]; differentiable. Results as `varlen_attention`."""
    out, lse = _ops.segment_attention(
        _unit_stride(q),
        _unit_stride(k),
        _unit_stride(v),
        segments,
        sample_ids,
        q_positions,
        k_positions,
        softmax_scale=softmax_scale,
        softcap=softcap,
        dropout_p=dropout_p,
        rng_key=rng_key,
        head_offset=head_offset,
    )
    return out, lse


def segment_attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    merge: bool = True,
    dropout_p: float = 0.0,
    rng_key: int = 0,
    sample_ids: Tensor | None = None,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
    head_offset: int = 0,
) -> None:
    """Attend over `segments` and write, or with `merge` fold into, `out` and `lse` in place.

    out [T, H, D]: the accumulation type when merging, else that or q's dtype; lse [H, T].
    """
    _ops.segment_attention_forward(
        _unit_stride(q),
        _unit_stride(k),
        _unit_stride(v),
        segments,
        out,
        lse,
        sample_ids,
        q_positions,
        k_positions,
        softmax_scale=_scale(softmax_scale, q),
        softcap=softcap,
        merge=merge,
        dropout_p=dropout_p,
        rng_key=rng_key,
        head_offset=head_offset,
    )
    _mark_written(out, lse)


def segment_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dlse: Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    rng_key: int = 0,
    sample_ids: Tensor | None = None,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
    head_offset: int = 0,
) -> None:
    """Add the gradients of `segments` to dq [T, H, D], dk and dv [Tk, Hk, D], in place.

    out (q's dtype or the accumulation type) and lse are the final results of the whole softmax.
    dq, dk, dv have the accumulation type. dlse [H, T] is the gradient of lse, when it has one.
    """
    _ops.segment_attention_backward(
        _unit_stride(dout),
        _unit_stride(q),
        _unit_stride(k),
        _unit_stride(v),
        out,
        lse,
        segments,
        dq,
        dk,
        dv,
        dlse,
        sample_ids,
        q_positions,
        k_positions,
        softmax_scale=_scale(softmax_scale, q),
        softcap=softcap,
        dropout_p=dropout_p,
        rng_key=rng_key,
        head_offset=head_offset,
    )
    _mark_written(dq, dk, dv)


def _mark_written(*tensors: Tensor) -> None:
    """Let autograd see writes of the in-place ops; under torch.compile it does by itself."""
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version(tensors)


def _scale(softmax_scale: float | None, q: Tensor) -> float:
    return q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale


def _unit_stride(x: Tensor) -> Tensor:
    """`x` itself where its last dimension has stride 1 (a view of a fused QKV has); else a copy."""
    return x if x.dim() == 0 or x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _fake_forward(q: Tensor) -> tuple[Tensor, Tensor]:
    total, heads = q.shape[0], q.shape[1]
    lse = torch.empty((heads, total), dtype=accumulation_dtype(q.dtype), device=q.device)
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), lse


def _fake_grad(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    return dq, dk, dv


def _fake_forward_of(q: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return _fake_forward(q)


def _fake_grad_of(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_grad(q, k, v)


def _fake_in_place(*args: Any, **kwargs: Any) -> None:
    return None


for _name, _fake in (
    ("varlen_attention", _fake_forward_of),
    ("segment_attention", _fake_forward_of),
    ("varlen_attention_grad", _fake_grad_of),
    ("segment_attention_grad", _fake_grad_of),
    ("segment_attention_forward", _fake_in_place),
    ("segment_attention_backward", _fake_in_place),
):
    fake(_name, _fake)


def _setup(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: Any) -> None:
    out, lse = output
    ctx.save_for_backward(*inputs, out, lse)
    ctx.options = dict(keyword_only_inputs)
    ctx.set_materialize_grads(False)


def _backward(grad_op: Any, indices: int) -> Any:
    """The autograd formula of an op with (q, k, v, `indices` index tensors, 3 dropout tensors)."""

    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, *rest, out, lse = ctx.saved_tensors
        nothing = (None,) * len(rest)
        if dout is None and dlse is None:
            return (None, None, None, *nothing)
        dout = torch.zeros_like(out) if dout is None else _unit_stride(dout)
        index, keys = rest[:indices], rest[indices:]
        dq, dk, dv = grad_op(dout, q, k, v, out, lse, *index, dlse, *keys, **ctx.options)
        return (dq, dk, dv, *nothing)

    return backward


autograd("varlen_attention", _backward(_ops.varlen_attention_grad, 2), _setup)
autograd("segment_attention", _backward(_ops.segment_attention_grad, 1), _setup)
once_differentiable("varlen_attention_grad")
once_differentiable("segment_attention_grad")
