"""Dense attention over a segment list with torch, head by head, in any precision, on any device.

In float64 it is the truth; in bf16 or fp16 it is the naive version whose error sets the bar.
"""

import torch


def visible(segments: list[list[int]], total_q: int, total_k: int, device) -> torch.Tensor:
    """[total_q, total_k] bool; segments must not show a pair twice."""
    seen = torch.zeros(total_q, total_k, dtype=torch.bool, device=device)
    for q0, q_len, k0, k_len, diagonal, window in segments:
        i = torch.arange(q_len, device=device)[:, None]
        j = torch.arange(k_len, device=device)[None]
        mask = j <= i + diagonal
        if window >= 0:
            mask &= j >= i + diagonal - window
        seen[q0 : q0 + q_len, k0 : k0 + k_len] |= mask
    return seen


def one_head(q, k, v, seen, scale, softcap):
    s = (q @ k.T) * scale
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    s = s.masked_fill(~seen, float("-inf"))
    empty = ~seen.any(1)
    s = s.masked_fill(empty[:, None], 0.0)  # softmax of nothing would be NaN
    p = s.softmax(-1).masked_fill(empty[:, None], 0.0)
    lse = s.float() if s.dtype in (torch.bfloat16, torch.float16) else s
    return p @ v, lse.logsumexp(-1).masked_fill(empty, float("-inf"))


def attention(q, k, v, segments, dout, dtype, *, scale=None, softcap=0.0):
    """(out, lse, dq, dk, dv) computed in `dtype`, returned in float64."""
    scale = q.shape[2] ** -0.5 if scale is None else scale
    seen = visible(segments, len(q), len(k), q.device)
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.zeros(q.shape[1], len(q), dtype=torch.float64, device=q.device)
    grads = [torch.zeros(x.shape, dtype=torch.float64, device=q.device) for x in (q, k, v)]
    for head in range(q.shape[1]):
        kv_head = head // (q.shape[1] // k.shape[1])
        leaves = [
            x.to(dtype).detach().requires_grad_()
            for x in (q[:, head], k[:, kv_head], v[:, kv_head])
        ]
        result, lse_row = one_head(*leaves, seen, scale, softcap)
        out[:, head] = result.detach()
        lse[head] = lse_row.detach()
        found = torch.autograd.grad(result, leaves, dout[:, head].to(dtype))
        for grad, index, value in zip(grads, (head, kv_head, kv_head), found, strict=True):
            grad[:, index] += value
    return out, lse, *grads
