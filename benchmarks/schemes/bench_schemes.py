"""Schemes against static Ulysses and static ring: attention forward + backward, tokens/s.

    python benchmarks/schemes/bench_schemes.py --ranks 2 --lengths 4096,16384 --json out.json

Every rank is a process with one thread; one causal sample of each length. Variants run interleaved,
`--repeats` times; a repeat's time is that of its slowest rank, the figure is the median. `exposed`
is the share of that time which a rank spent waiting for messages. Gradients are not compared here:
tests/distributed/test_schemes.py does.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from megatron_dcp.schemes import attention
from megatron_dcp.testing.cases.attention import block_context, cached_world
from megatron_dcp.testing.pool import WorkerPool


def case(
    *,
    length: int,
    heads: int,
    kv_heads: int,
    dim: int,
    repeats: int,
    dtype: str,
    only: list[str],
) -> dict[str, Any]:
    """Runs on every rank: seconds and exposed seconds per variant and repeat."""
    from plain import plain_ring, plain_ulysses

    world = cached_world()
    n = world.size
    schemes = {"ulysses": n, "ring": 1, "allgather": 1}
    contexts = {s: block_context(world, [length], s, u) for s, u in schemes.items()}
    variants = {s: (lambda *x, c=c: attention(*x, placement=c)) for s, c in contexts.items()}
    variants |= {"plain ulysses": plain_ulysses, "plain ring": plain_ring}
    variants = {name: run for name, run in variants.items() if not only or name in only}
    seconds: dict[str, list[float]] = {v: [] for v in variants}
    exposed: dict[str, list[float]] = {v: [] for v in variants}
    waited = 0.0

    def heard(kind: str, begin_ns: int, end_ns: int) -> None:
        nonlocal waited
        waited += (end_ns - begin_ns) / 1e9

    world.wire.listener = heard
    for repeat in range(repeats + 1):  # the first warms up
        for name, run in variants.items():
            context = contexts.get(name)
            t = context.tokens if context else length // n
            q = torch.randn(t, heads, dim).to(getattr(torch, dtype)).requires_grad_()
            k, v = (torch.randn(t, kv_heads, dim).to(q.dtype).requires_grad_() for _ in range(2))
            dist.barrier()
            waited, begin = 0.0, time.perf_counter()
            out = run(q, k, v)
            torch.autograd.backward(out, torch.ones_like(out))
            elapsed = time.perf_counter() - begin
            if repeat:
                seconds[name].append(elapsed)
                exposed[name].append(waited)
    world.wire.listener = None
    return {"seconds": seconds, "exposed": exposed}


def main() -> None:
    """Run the cases and print a table, and JSON rows where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--lengths", default="4096,16384")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--variants", default="", help="comma separated; default all")
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    rows = []
    pool = WorkerPool(limit=a.ranks, timeout_s=1800, extra_path=str(Path(__file__).parent))
    try:
        for length in map(int, a.lengths.split(",")):
            results = pool.run(
                a.ranks, "bench_schemes:case", length=length, heads=a.heads, kv_heads=a.kv_heads,
                dim=a.dim, repeats=a.repeats, dtype=a.dtype,
                only=[v for v in a.variants.split(",") if v],
            )  # fmt: skip
            rows += _rows(length, results)
    finally:
        pool.close()
    for r in rows:
        print("{length:>7} {variant:<14} {tokens_per_s:>10.0f} tok/s  exposed {exposed:5.1%}  "
              "vs plain {ratio}".format(**r, ratio=_text(r["vs_plain"])))  # fmt: skip
    if a.json:
        about = {"command": " ".join(sys.argv), "machine": platform.processor() or "cpu",
                 "torch": torch.__version__, "ranks": a.ranks, "dtype": a.dtype,
                 "load": os.getloadavg()[0]}  # fmt: skip
        a.json.write_text(json.dumps({"schema": "mdcp.bench-schemes/1", **about, "rows": rows}))


def _text(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def _rows(length: int, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    medians, shares = {}, {}
    for name in results[0]["seconds"]:
        slowest = [max(x) for x in zip(*(r["seconds"][name] for r in results), strict=True)]
        medians[name] = statistics.median(slowest)
        shares[name] = max(sum(r["exposed"][name]) / sum(r["seconds"][name]) for r in results)
    best = {"ulysses": "plain ulysses", "ring": "plain ring", "allgather": "plain ring"}
    return [
        {
            "length": length,
            "variant": name,
            "seconds": seconds,
            "tokens_per_s": length / seconds,
            "exposed": shares[name],
            "vs_plain": medians[best[name]] / seconds if best.get(name) in medians else None,
        }
        for name, seconds in medians.items()
    ]


if __name__ == "__main__":
    main()
