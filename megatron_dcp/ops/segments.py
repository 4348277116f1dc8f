"""Segment lists for the usual cases; int64 [S, 6] as `megatron_dcp.ops` describes them.

Columns: q_start, q_len, k_start, k_len, diagonal, window.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Q_START, Q_LEN, K_START, K_LEN, DIAGONAL, WINDOW = range(6)


def segment_tensor(rows: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> Tensor:
    """`rows` as an int64 [S, 6] tensor; an empty list gives [0, 6]."""
    return torch.tensor(rows, dtype=torch.int64, device=device).reshape(-1, 6)


def full_segment(q_start: int, q_len: int, k_start: int, k_len: int) -> tuple[int, ...]:
    """Every row of the rectangle sees every key."""
    return (q_start, q_len, k_start, k_len, k_len, -1)


def band_segment(
    q_start: int,
    q_len: int,
    k_start: int,
    k_len: int,
    *,
    q_position: int,
    k_position: int,
    left: int = -1,
    right: int = 0,
) -> tuple[int, ...]:
    """A rectangle whose first row and key stand at the given positions of one sample.

    Row at position p sees keys at positions p - left .. p + right; -1 is no limit.
    """
    ahead = q_len + k_len + abs(q_position - k_position) if right < 0 else right
    window = -1 if left < 0 else left + ahead
    return (q_start, q_len, k_start, k_len, q_position - k_position + ahead, window)


def packed_segments(
    lengths_q: Sequence[int],
    lengths_k: Sequence[int],
    *,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """What `varlen_attention` uses: one segment a sequence, aligned to the bottom right."""
    left, right = window_size
    rows, q, k = [], 0, 0
    for lq, lk in zip(lengths_q, lengths_k, strict=True):
        rows.append(
            band_segment(
                q,
                lq,
                k,
                lk,
                q_position=lk - lq,
                k_position=0,
                left=left,
                right=0 if causal else right,
            )
        )
        q, k = q + lq, k + lk
    return segment_tensor(rows)
