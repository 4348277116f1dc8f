"""Static Ulysses and static ring as one writes them first: what the schemes are compared with.

One causal sample, equal contiguous shards, torch's fused attention. Ulysses: three all-to-alls
before (KV heads repeated to the query heads) and one after. Ring: blocking sends of K and V, one
block of attention a step, partial results merged by their log-sum-exp.

`waited` adds up the seconds that a rank spent in messages, all of them exposed.

Shape legend: t local tokens, n ranks, H heads, D head dim; torch's kernels take [1, H, t, D].
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


waited = [0.0]


@contextmanager
def _waiting() -> Iterator[None]:
    begin = time.perf_counter()
    yield
    waited[0] += time.perf_counter() - begin


def _all_to_all(x: Tensor) -> Tensor:
    out, send = torch.empty_like(x), x.contiguous()
    with _waiting():
        dist.all_to_all_single(out, send)
    return out


class _AllToAll(torch.autograd.Function):
    """[n, t, h, D] -> [n, t, h, D]: slice j goes to rank j."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _all_to_all(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _all_to_all(grad)


def plain_ulysses(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [t, H, D], k and v [t, Hk, D] -> [t, H, D]."""
    n, (t, heads, dim) = dist.get_world_size(), q.shape
    repeat = heads // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)

    def to_heads(x: Tensor) -> Tensor:
        y = _AllToAll.apply(x.reshape(t, n, heads // n, dim).transpose(0, 1))
        return y.reshape(1, n * t, heads // n, dim).transpose(1, 2)

    out = scaled_dot_product_attention(*(to_heads(x) for x in (q, k, v)), is_causal=True)
    back = _AllToAll.apply(out.transpose(1, 2).reshape(n, t, heads // n, dim))
    return back.transpose(0, 1).reshape(t, heads, dim)


def _pass_on(tensors: list[Tensor]) -> list[Tensor]:
    """Send to the next rank, receive from the one before, wait."""
    n, me = dist.get_world_size(), dist.get_rank()
    got = [torch.empty_like(x) for x in tensors]
    send = [x.contiguous() for x in tensors]
    with _waiting():
        works = [dist.isend(x, (me + 1) % n) for x in send]
        works += [dist.irecv(x, (me - 1) % n) for x in got]
        for w in works:
            w.wait()
    return got


class _PlainRing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n, me = dist.get_world_size(), dist.get_rank()
        keep = (k, v)
        out = torch.zeros_like(q, dtype=torch.float32)
        lse = torch.full(q.shape[:3], float("-inf"))
        for step in range(n):
            source = (me - step) % n
            if source <= me:
                part, part_lse = _flash(q, k, v, 0.0, source == me)
                total = torch.logaddexp(lse, part_lse)
                out = out * (lse - total).exp()[..., None]
                out += part * (part_lse - total).exp()[..., None]
                lse = total
            if step < n - 1:
                k, v = _pass_on([k, v])
        result = out.to(q.dtype)
        ctx.save_for_backward(q, *keep, result, lse)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        n, me = dist.get_world_size(), dist.get_rank()
        dq = torch.zeros_like(q)
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        for step in range(n):
            source = (me - step) % n
            if source <= me:
                parts = _flash_backward(grad, q, k, v, out, lse, 0.0, source == me)
                dq, dk, dv = dq + parts[0], dk + parts[1], dv + parts[2]
            k, v, dk, dv = _pass_on([k, v, dk, dv])
        return dq, dk, dv


def plain_ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [t, H, D], k and v [t, Hk, D] -> [t, H, D]; rank order is token order."""
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    out = _PlainRing.apply(*(x.transpose(0, 1)[None].contiguous() for x in (q, k, v)))
    return out[0].transpose(0, 1)
