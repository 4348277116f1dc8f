"""Fused slots, as tried: short samples' attention while a wide sample's all-to-all is under way.

    python benchmarks/schemes/fused_slots.py --wide 2048,8192 --narrow 1024 --link 0,50

Each rank runs attention forward + backward of one sample over all ranks (`--wide` tokens) and of
two samples of its own (`--narrow` tokens each). `ulysses`, `ring`, `allgather`: one placement after
another, as the engine runs them. `fused`: ulysses, one short sample computed under each all-to-all
of forward and of backward; its results are checked against `ulysses`. `--link`: MB/s that a rank
can send, 0 for loopback as it is. Variants run interleaved; the figure is the least of the repeats
of the slower rank, which other load disturbs less than a median. docs/log.md says what came of it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from megatron_dcp.dist import PlacementContext
from megatron_dcp.dist.pacing import LinkPacer
from megatron_dcp.schemes import AttentionOptions, attention
from megatron_dcp.schemes.core import attend_whole
from megatron_dcp.testing.cases.attention import block_context, cached_world
from megatron_dcp.testing.pool import WorkerPool

HEADS, KV_HEADS, DIM = 8, 2, 64
Part = dict[str, Tensor]


def part(tokens: int) -> Part:
    """q, k, v and the gradient of the output."""
    heads = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS, "dout": HEADS}
    return {n: torch.randn(tokens, h, DIM).requires_grad_(n != "dout") for n, h in heads.items()}


def run(x: Part, ctx: PlacementContext) -> None:
    """Forward and backward of one placement."""
    torch.autograd.backward(attention(x["q"], x["k"], x["v"], placement=ctx), x["dout"])


class Exchange:
    """An all-to-all under way: [u, t, h, D] -> [T, h, D], or back."""

    def __init__(self, x: Tensor, ctx: PlacementContext, *, back: bool) -> None:
        rows = list(ctx.shards.tokens)
        mine = [rows[ctx.block_rank]] * ctx.inner
        send = x.reshape(-1, *x.shape[-2:]).contiguous()
        take, give = (mine, rows) if back else (rows, mine)
        self._shape = (ctx.inner, mine[0]) if back else (sum(rows),)
        self._out = x.new_empty((sum(take), *x.shape[-2:]))
        wire, group = ctx.world.wire, ctx.inner_group()
        self._pending = wire.start_all_to_all(self._out, send, take, give, group, "ulysses")

    def wait(self) -> Tensor:
        self._pending.wait()
        return self._out.view(*self._shape, *self._out.shape[1:])


def by_rank(x: Tensor, u: int) -> Tensor:
    """[t, h, D] -> [u, t, h/u, D]."""
    return x.reshape(x.shape[0], u, -1, x.shape[2]).transpose(0, 1)


def fused(wide: Part, narrow: list[Part], ctx: PlacementContext, own: PlacementContext) -> None:
    """Forward and backward of the wide sample and of both short ones, interleaved."""
    u = ctx.inner
    sizes = [HEADS // u, KV_HEADS // u, KV_HEADS // u]
    with torch.no_grad():
        packed = torch.cat([by_rank(wide[n], u) for n in "qkv"], dim=2)
    coming = Exchange(packed, ctx, back=False)
    outs = [attention(narrow[0]["q"], narrow[0]["k"], narrow[0]["v"], placement=own)]
    qkv = [x.requires_grad_() for x in coming.wait().split(sizes, dim=1)]
    out = attend_whole(qkv[0], qkv[1], qkv[2], ctx, AttentionOptions())
    coming = Exchange(out.detach(), ctx, back=True)
    outs.append(attention(narrow[1]["q"], narrow[1]["k"], narrow[1]["v"], placement=own))
    coming.wait()
    coming = Exchange(by_rank(wide["dout"], u), ctx, back=False)
    torch.autograd.backward(outs[0], narrow[0]["dout"])
    torch.autograd.backward(out, coming.wait())
    grads = torch.cat([x.grad for x in qkv if x.grad is not None], dim=1)
    coming = Exchange(grads, ctx, back=True)
    torch.autograd.backward(outs[1], narrow[1]["dout"])
    parts = coming.wait().split(sizes, dim=2)
    for n, x in zip("qkv", parts, strict=True):
        wide[n].grad = x.transpose(0, 1).reshape(wide[n].shape)


def case(*, wide: int, narrow: int, link: float, repeats: int) -> dict[str, list[float]]:
    """Runs on every rank: seconds per variant and repeat."""
    world = cached_world()
    modes = {"ulysses": world.size, "ring": 1, "allgather": 1}
    contexts = {s: block_context(world, [wide], s, u) for s, u in modes.items()}
    own = block_context(world, [narrow], "local", 1, degree=1, first_rank=world.rank)
    short = [part(narrow) for _ in range(2)]
    long = {s: part(c.tokens) for s, c in contexts.items()}

    def apart(scheme: str) -> Callable[[], None]:
        def both() -> None:
            for x, ctx in ((long[scheme], contexts[scheme]), (short[0], own), (short[1], own)):
                run(x, ctx)

        return both

    def together() -> None:
        fused(long["ulysses"], short, contexts["ulysses"], own)

    variants: dict[str, Callable[[], None]] = {s: apart(s) for s in modes} | {"fused": together}
    seconds: dict[str, list[float]] = {v: [] for v in variants}
    kept: dict[str, list[Tensor]] = {}
    world.wire.pacer = LinkPacer(link * 1e6) if link else None
    for repeat in range(repeats + 1):  # the first warms up
        for name, variant in variants.items():
            held = [x for p in (*long.values(), *short) for n, x in p.items() if n != "dout"]
            for x in held:
                x.grad = None
            dist.barrier()
            begin = time.perf_counter()
            variant()
            if repeat:
                seconds[name].append(time.perf_counter() - begin)
            kept[name] = [p[n].grad for p in (long["ulysses"], *short) for n in "qkv"]
    world.wire.pacer = None
    for a, b in zip(kept["ulysses"], kept["fused"], strict=True):
        torch.testing.assert_close(a, b)
    return seconds


def main() -> None:
    """Print one row per case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--wide", default="2048,8192")
    parser.add_argument("--narrow", type=int, default=1024)
    parser.add_argument("--link", default="0,50")
    parser.add_argument("--repeats", type=int, default=9)
    a = parser.parse_args()
    names = ("ulysses", "ring", "allgather", "fused")
    print(
        "| link MB/s | wide | " + " | ".join(f"{n} ms" for n in names) + " | best apart / fused |"
    )
    print("|" + " --- |" * (len(names) + 3))
    pool = WorkerPool(limit=a.ranks, timeout_s=1800, extra_path=str(Path(__file__).parent))
    try:
        for link in map(float, a.link.split(",")):
            for wide in map(int, a.wide.split(",")):
                args: dict[str, Any] = {"wide": wide, "narrow": a.narrow, "link": link}
                found = pool.run(a.ranks, "fused_slots:case", repeats=a.repeats, **args)
                ms = {}
                for n in names:
                    slowest = [max(x) for x in zip(*(r[n] for r in found), strict=True)]
                    ms[n] = 1e3 * min(slowest)
                cells = " | ".join(f"{ms[n]:.0f}" for n in names)
                ratio = min(ms[n] for n in names[:3]) / ms["fused"]
                print(f"| {link or 'as it is'} | {wide} | {cells} | {ratio:.3f}x |", flush=True)
    finally:
        pool.close()


if __name__ == "__main__":
    main()
