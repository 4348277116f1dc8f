"""Attention written in the plainest way, for comparison: dense scores, boolean masks, float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def visible(
    length: int,
    *,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    documents: Sequence[int] | None = None,
    prefix: int = 0,
) -> Tensor:
    """[L, L] bool: which key (column) each query (row) of one sample sees."""
    p = torch.arange(length)
    query, key = p[:, None], p[None, :]
    left, right = window_size
    document = torch.zeros(length, dtype=torch.int64)
    if documents is not None:
        document = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents))
    same = document[:, None] == document[None, :]
    see = torch.ones(length, length, dtype=torch.bool)
    if causal:
        see &= key <= query
    elif right >= 0:
        see &= key <= query + right
    if left >= 0:
        see &= key >= query - left
    if causal and prefix:
        both = (query < prefix) & (key < prefix)
        see = torch.where(query < prefix, both, see)
    return see & same


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    see: Tensor,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """One sample: q [L, H, D], k and v [L, Hk, D], see [L, L] -> [L, H, D]. Blind rows give 0."""
    ratio = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(ratio, 1), v.repeat_interleave(ratio, 1)
    scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~see, float("-inf"))
    blind = ~see.any(dim=1)
    weights = torch.softmax(scores.masked_fill(blind[None, :, None], 0.0), dim=-1)
    weights = weights.masked_fill(blind[None, :, None], 0.0)
    return torch.einsum("hqk,khd->qhd", weights, v)
