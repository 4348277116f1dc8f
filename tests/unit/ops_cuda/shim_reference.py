"""Attention over a segment list in float64, written from its definition, one row at a time.

No tiles, no online softmax, no lists of segments per row: each pair is asked whether some segment
shows it. Returns what the op promises: out, natural-log lse, and gradients that also flow from lse.
"""

import numpy as np


def visible(segments, rows_q: int, rows_k: int) -> np.ndarray:
    """[Tq, Tk]: how many segments show each pair (a pair shown twice counts twice)."""
    seen = np.zeros((rows_q, rows_k), np.int64)
    for q0, q_len, k0, k_len, diagonal, window in segments:
        i = np.arange(q_len)[:, None]
        j = np.arange(k_len)[None, :]
        mask = j <= i + diagonal
        if window >= 0:
            mask &= j >= i + diagonal - window
        seen[q0 : q0 + q_len, k0 : k0 + k_len] += mask
    return seen


def scores(p, head: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores [Tq, Tk] after softcap, and their derivative by the raw scaled product."""
    kv_head = head // (p.q.shape[1] // p.k.shape[1])
    s = p.q[:, head] @ p.k[:, kv_head].T * p.scale
    if p.softcap == 0:
        return s, np.ones_like(s)
    t = np.tanh(s / p.softcap)
    return p.softcap * t, 1 - t * t


def forward(p, keep=None):
    """(out [Tq, H, D], lse [H, Tq]); keep [H, Tq, Tk]: dropout factors of the weights."""
    rows, heads, _ = p.q.shape
    out = np.zeros(p.q.shape)
    lse = np.full((heads, rows), -np.inf)
    seen = visible(p.segments, rows, len(p.k))
    for head in range(heads):
        kv_head = head // (heads // p.k.shape[1])
        s, _ = scores(p, head)
        for row in np.flatnonzero(seen.sum(1)):
            top = s[row][seen[row] > 0].max()
            weight = np.where(seen[row] > 0, np.exp(s[row] - top), 0) * seen[row]
            lse[head, row] = top + np.log(weight.sum())
            weight /= weight.sum()
            if keep is not None:
                weight = weight * keep[head, row]
            out[row, head] = weight @ p.v[:, kv_head]
    return out, lse


def backward(p, dout, dlse=None, keep=None, out=None, lse=None):
    """(dq, dk, dv). out, lse: over all keys of all steps; default: of this call alone."""
    rows, heads, _ = p.q.shape
    if out is None:
        out, lse = forward(p, keep)
    dq, dk, dv = np.zeros(p.q.shape), np.zeros(p.k.shape), np.zeros(p.v.shape)
    seen = visible(p.segments, rows, len(p.k))
    for head in range(heads):
        kv_head = head // (heads // p.k.shape[1])
        s, slope = scores(p, head)
        safe = np.where(np.isneginf(lse[head]), np.inf, lse[head])
        weight = np.where(seen > 0, np.exp(np.minimum(s - safe[:, None], 80)), 0) * seen
        dropped = weight if keep is None else weight * keep[head]
        dp = dout[:, head] @ p.v[:, kv_head].T
        if keep is not None:
            dp = dp * keep[head]
        delta = (out[:, head] * dout[:, head]).sum(1)
        if dlse is not None:
            delta = delta - dlse[head]
        ds = weight * (dp - delta[:, None]) * slope * p.scale
        dq[:, head] = ds @ p.k[:, kv_head]
        dk[:, kv_head] += ds.T @ p.q[:, head]
        dv[:, kv_head] += dropped.T @ dout[:, head]
    return dq, dk, dv


def merge(first, second):
    """Joins two (out, lse) of disjoint keys."""
    (out_a, lse_a), (out_b, lse_b) = first, second
    top = np.maximum(lse_a, lse_b)
    safe = np.where(np.isneginf(top), 0, top)
    a, b = np.exp(lse_a - safe), np.exp(lse_b - safe)
    total = a + b
    with np.errstate(divide="ignore"):
        lse = np.where(total > 0, safe + np.log(total), -np.inf)
    share = np.where(total > 0, a / np.where(total > 0, total, 1), 0).T[..., None]
    other = np.where(total > 0, b / np.where(total > 0, total, 1), 0).T[..., None]
    return share * out_a + other * out_b, lse


def naive(p, dout, round_):
    """(out, dq, dk, dv) as plain low-precision code computes them: every result rounded.

    The error of this against float64 is what the kernels may have twice. For one head per KV head
    and rows that all see a key.
    """
    seen = visible(p.segments, len(p.q), len(p.k))
    out, dq = np.zeros(p.q.shape), np.zeros(p.q.shape)
    dk, dv = np.zeros(p.k.shape), np.zeros(p.v.shape)
    for head in range(p.q.shape[1]):
        kv_head = head // (p.q.shape[1] // p.k.shape[1])
        q, k, v, do = p.q[:, head], p.k[:, kv_head], p.v[:, kv_head], dout[:, head]
        s = round_(round_(q @ k.T) * p.scale)
        slope = 1.0
        if p.softcap:
            t = round_(np.tanh(round_(s / p.softcap)))
            s, slope = round_(p.softcap * t), round_(1 - t * t)
        s = np.where(seen > 0, s, -np.inf)
        with np.errstate(invalid="ignore"):
            weight = np.nan_to_num(np.exp(s - s.max(1, keepdims=True))) * seen
        weight = round_(weight / np.maximum(weight.sum(1, keepdims=True), 1e-300))
        out[:, head] = round_(weight @ v)
        dp = round_(do @ v.T)
        inner = round_((weight * dp).sum(1, keepdims=True))
        ds = round_(round_(weight * (dp - inner)) * slope * p.scale)
        dq[:, head] = round_(ds @ k)
        dk[:, kv_head] = round_(dk[:, kv_head] + round_(ds.T @ q))
        dv[:, kv_head] = round_(dv[:, kv_head] + round_(weight.T @ do))
    return out, dq, dk, dv
