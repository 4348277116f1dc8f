"""Pure torch references of the ops: dense, slow, differentiable by torch's own autograd.

They are what the kernels are tested against and what a reader should read first. They compute in
the dtype given; pass float64 for a reference.

Shape legend: T tokens, H query heads, Hk KV heads, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_dcp.ops.segments import packed_segments

_WORD = 0xFFFFFFFF


def segment_mask(segments: Tensor, total_q: int, total_k: int) -> Tensor:
    """int64 [total_q, total_k]: how many segments show the pair (a pair may be listed twice)."""
    mask = torch.zeros(total_q, total_k, dtype=torch.int64)
    for qs, ql, ks, kl, diagonal, window in segments.tolist():
        offset = torch.arange(kl)[None, :] - torch.arange(ql)[:, None] - diagonal
        seen = offset <= 0
        if window >= 0:
            seen &= offset >= -window
        mask[qs : qs + ql, ks : ks + kl] += seen
    return mask


def philox_words(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 on int64 tensors that hold 32-bit words; returns four such tensors."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            ((b >> 32) & _WORD) ^ c1 ^ k0,
            b & _WORD,
            ((a >> 32) & _WORD) ^ c3 ^ k1,
            a & _WORD,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def dropout_factors(
    dropout_p: float,
    rng_key: int,
    sample_ids: Tensor,
    q_positions: Tensor,
    k_positions: Tensor,
    heads: int,
    head_offset: int = 0,
) -> Tensor:
    """float64 [H, total_q, total_k]: 0 or 1 / (1 - p), from (key, sample, head, positions)."""
    h = (torch.arange(heads) + head_offset)[:, None, None]
    sample, q_pos, k_pos = sample_ids[None, :, None], q_positions[None, :, None], k_positions
    shape = (heads, sample.shape[1], k_pos.shape[0])
    group = (k_pos >> 2)[None, None, :]
    c0, c1, c2, c3 = ((x & _WORD).expand(shape) for x in (group, q_pos, h, sample))
    key = (
        torch.tensor(rng_key & _WORD).expand(shape),
        (((rng_key >> 32) & _WORD) ^ ((sample >> 32) & _WORD)).expand(shape),
    )
    words = torch.stack(philox_words((c0, c1, c2, c3), key))
    lane = (k_pos & 3)[None, None, None, :].expand(1, *shape)
    word = words.gather(0, lane)[0]
    keep = word >= int(dropout_p * 4294967296.0)
    return keep.to(torch.float64) / (1.0 - dropout_p)


def segment_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Tensor,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    dropout: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out [T, H, D] and lse [H, T] over the pairs of `segments`, in the dtype of q.

    dropout: factors [H, total_q, total_k] from `dropout_factors`, or None.
    """
    total_q, heads, dim = q.shape
    group = heads // k.shape[1]
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    k_full, v_full = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k_full) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    count = segment_mask(segments, total_q, k.shape[0])
    # A pair listed n times counts n times in the softmax: its score gains log n.
    scores = scores + torch.log(count.to(q.dtype))
    seen = count.sum(1) > 0
    # Rows that see nothing are replaced before the softmax, so that no NaN enters the graph.
    safe = torch.where(seen[None, :, None], scores, torch.zeros((), dtype=q.dtype))
    lse = torch.logsumexp(safe, dim=-1)
    p = torch.where(seen[None, :, None], torch.exp(safe - lse[..., None]), 0.0)
    if dropout is not None:
        p = p * dropout.to(q.dtype)
    out = torch.einsum("hqk,khd->qhd", p.to(q.dtype), v_full)
    return out, torch.where(seen[None, :], lse, float("-inf"))


def varlen_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    dropout: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`varlen_attention` in plain torch; arguments and results as there, in the dtype of q."""
    segments = packed_segments(
        cu_seqlens_q.diff().tolist(),
        cu_seqlens_k.diff().tolist(),
        causal=causal,
        window_size=window_size,
    )
    return segment_attention_reference(
        q, k, v, segments, softmax_scale=softmax_scale, softcap=softcap, dropout=dropout
    )


def zigzag_reference(lengths: list[int], degree: int) -> list[list[tuple[int, int]]]:
    """Per rank, the (sample, position) pairs it holds, in order."""
    ranks = []
    for rank in range(degree):
        held = []
        for sample, length in enumerate(lengths):
            for chunk in (rank, 2 * degree - 1 - rank):
                first, last = (c * length // (2 * degree) for c in (chunk, chunk + 1))
                held += [(sample, p) for p in range(first, last)]
        ranks.append(held)
    return ranks


def merge_lse_reference(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """`merge_lse` by torch's own logaddexp; not differentiable where both parts are empty."""
    lse = torch.logaddexp(lse_a, lse_b)
    empty = torch.isneginf(lse)
    safe = torch.where(empty, torch.zeros_like(lse), lse)
    weight_a, weight_b = (torch.exp(x - safe).T[..., None] for x in (lse_a, lse_b))
    return weight_a * out_a + weight_b * out_b, lse


def rope_reference(
    x: Tensor, positions: Tensor, frequencies: Tensor, scale: float, interleaved: bool
) -> Tensor:
    """`rope` with torch's own sin and cos, in the dtype of x."""
    pairs = frequencies.shape[0]
    angle = positions.double()[:, None] * frequencies
    cos, sin = ((f * scale).to(x.dtype)[:, None, :] for f in (angle.cos(), angle.sin()))
    rotated, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    if interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = rotated[..., :pairs], rotated[..., pairs:]
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((turned, rest), dim=-1)


def cross_entropy_reference(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """`cross_entropy`'s loss by torch's own, in the dtype of the logits."""
    kept = labels >= 0
    losses = torch.nn.functional.cross_entropy(logits[kept], labels[kept], reduction="none")
    return (losses * weights[kept]).sum()
