"""Our schemes against static Ulysses and static ring written in the plainest way, on 2 ranks.

    python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/end_to_end/schemes.py

One causal attention layer, one sample per pack, forward + backward, one thread per rank, repeats
interleaved. Plain Ulysses: all-to-all, torch's SDPA, all-to-all. Plain ring: contiguous shards,
blocking send and receive, torch's flash kernel per step, merged by logsumexp. Prints tokens/s of
each, the ratio of each scheme of ours to its plain form, and the share of the time in which ours
waited for communication. `--bytes-per-s` paces the wire of ours and of the plain ones alike.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import megatron_dcp as mdcp
from megatron_dcp.dist import DataWorld, LinkPacer, make_context
from megatron_dcp.plan import Placement

HEADS, KV_HEADS, DIM = 8, 2, 64
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class _AllToAll(torch.autograd.Function):
    """[t, heads, D] -> [2 t, heads / 2, D] and back, evenly."""

    @staticmethod
    def forward(fn: Any, x: Tensor, gather: bool, send: Callable[[Tensor], Tensor]) -> Tensor:
        fn.gather, fn.send = gather, send
        return _exchange(x, gather, send)

    @staticmethod
    def backward(fn: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _exchange(grad, not fn.gather, fn.send), None, None


def _exchange(x: Tensor, gather: bool, send: Callable[[Tensor], Tensor]) -> Tensor:
    t, heads, dim = x.shape
    if gather:
        parts = x.view(t, 2, heads // 2, dim).transpose(0, 1).contiguous()
        return send(parts).view(2 * t, heads // 2, dim)
    parts = send(x.contiguous().view(2, t // 2, heads, dim))
    return parts.transpose(0, 1).reshape(t // 2, 2 * heads, dim)


def plain_ulysses(q: Tensor, k: Tensor, v: Tensor, send: Callable[[Tensor], Tensor]) -> Tensor:
    q, k, v = (_AllToAll.apply(x, True, send) for x in (q, k, v))
    out = F.scaled_dot_product_attention(
        *(x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)), is_causal=True, enable_gqa=True
    )
    return _AllToAll.apply(out[0].transpose(0, 1), False, send)


def _heads_first(x: Tensor, repeat: int = 1) -> Tensor:
    return x.repeat_interleave(repeat, dim=1).transpose(0, 1).unsqueeze(0).contiguous()


class _PlainRing(torch.autograd.Function):
    """Rank r of two: causal on its own shard, then all of rank 0's shard for rank 1."""

    @staticmethod
    def forward(fn: Any, q: Tensor, k: Tensor, v: Tensor, swap: Callable[[Tensor], Tensor]) -> Any:
        rank, rep = dist.get_rank(), HEADS // KV_HEADS
        remote = swap(torch.stack((k, v)))
        parts = [(k, v, True)] + ([(remote[0], remote[1], False)] if rank else [])
        out, lse = None, None
        for kk, vv, causal in parts:
            o, s = _flash(_heads_first(q), _heads_first(kk, rep), _heads_first(vv, rep),
                          is_causal=causal)  # fmt: skip
            if out is None:
                out, lse = o, s
                continue
            both = torch.logaddexp(lse, s)
            out = out * (lse - both).exp()[..., None] + o * (s - both).exp()[..., None]
            lse = both
        fn.save_for_backward(q, k, v, remote, out, lse)
        fn.swap = swap
        return out[0].transpose(0, 1)

    @staticmethod
    def backward(fn: Any, dout: Tensor) -> Any:
        q, k, v, _, out, lse = fn.saved_tensors
        rank, rep = dist.get_rank(), HEADS // KV_HEADS
        remote = fn.swap(torch.stack((k, v)))
        grad = dout.transpose(0, 1).unsqueeze(0).contiguous()

        def part(kk: Tensor, vv: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
            dq, dk, dv = _flash_backward(
                grad, _heads_first(q), _heads_first(kk, rep), _heads_first(vv, rep), out, lse,
                0.0, causal,
            )  # fmt: skip
            folded = torch.stack((dk, dv)).view(2, KV_HEADS, rep, -1, DIM).sum(2)
            return dq[0].transpose(0, 1), folded.transpose(1, 2)

        dq, dkv = part(k, v, True)
        away = torch.zeros_like(dkv)
        if rank:
            more, away = part(remote[0], remote[1], False)
            dq = dq + more
        dkv = dkv + fn.swap(away.contiguous())
        return dq, dkv[0], dkv[1], None


def bench(tokens: int, repeats: int, world: DataWorld) -> list[dict[str, Any]]:
    waited = [0.0]
    world.wire.listener = lambda kind, a, b: waited.__setitem__(0, waited[0] + (b - a) / 1e9)
    me, other = world.rank, 1 - world.rank

    def send(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        rows = [x.shape[0] // 2] * 2
        return world.wire.all_to_all(out, x, rows, rows, world.group, "plain")

    def swap(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        world.wire.start_exchange([(x, other)], [(out, other)], world.group, "plain").wait()
        return out

    def ours(scheme: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        inner = 2 if scheme == "ulysses" else 1
        placement = Placement(slot=0, first_rank=0, degree=2, samples=(0,), scheme=scheme,
                              inner_degree=inner)  # fmt: skip
        context = make_context(world, placement, [tokens])
        return lambda q, k, v: mdcp.attention(q, k, v, placement=context)

    cases: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "plain-ulysses": lambda q, k, v: plain_ulysses(q, k, v, send),
        "plain-ring": lambda q, k, v: _PlainRing.apply(q, k, v, swap),
        "ulysses": ours("ulysses"),
        "ring": ours("ring"),
        "allgather": ours("allgather"),
    }
    torch.manual_seed(me)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    q, k, v = (torch.randn(tokens // 2, h, DIM, requires_grad=True) for h in heads)
    seconds: dict[str, list[float]] = {n: [] for n in cases}
    exposed: dict[str, float] = dict.fromkeys(cases, 0.0)
    for repeat in range(repeats + 1):
        for name, run in cases.items():
            world.rendezvous(0, 2)
            waited[0], begin = 0.0, time.perf_counter()
            run(q, k, v).sum().backward()
            world.rendezvous(0, 2)
            if repeat:
                seconds[name].append(time.perf_counter() - begin)
                exposed[name] += waited[0]
    rows = []
    for name, taken in seconds.items():
        plain = seconds["plain-ulysses" if name.endswith("ulysses") else "plain-ring"]
        ratios = torch.tensor(plain) / torch.tensor(taken)
        rows.append({
            "tokens": tokens, "scheme": name,
            "tokens_per_s": round(tokens * len(taken) / sum(taken)),
            "ratio_to_plain": round(float(ratios.mean()), 3),
            "ratio_std": round(float(ratios.std()), 3),
            "exposed_comm_share": round(exposed[name] / sum(taken), 4),
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bytes-per-s", type=float)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"]) % len(cores)]})
    dist.init_process_group("gloo")
    world = DataWorld()
    world.ensure_groups([(0, 2)])
    if options.bytes_per_s:
        world.wire.pacer = LinkPacer(options.bytes_per_s)
    for tokens in options.tokens:
        for row in bench(tokens, options.repeats, world):
            if world.rank == 0:
                print(json.dumps(row), flush=True)
    world.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
