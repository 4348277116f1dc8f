"""Schemes against static Ulysses and static ring: forward + backward, tokens/s.

    python benchmarks/schemes/bench_schemes.py --ranks 2 --lengths 4096,16384 --json out.json
    python benchmarks/schemes/bench_schemes.py --lengths 4096 --layers 2

Every rank is a process with one thread; one causal sample of each length. By default attention
alone; `--layers N` runs a decoder of N layers with it instead. Variants run interleaved,
`--repeats` times; a repeat's time is that of its slowest rank, the figure is the median. `exposed`
is the share of that time which a rank spent waiting for messages. `local`: one rank computes
everything, what a block has to beat. `hybrid` needs 4 ranks. Gradients are not compared here:
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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from megatron_dcp.schemes import attention
from megatron_dcp.testing.cases.attention import block_context, cached_world
from megatron_dcp.testing.models import TinyModel, weighted_loss_sum
from megatron_dcp.testing.pool import WorkerPool

PLAIN = ("plain ulysses", "plain ring")


def contexts(length: int) -> dict[str, Any]:
    """Variant -> placement of this rank; None where the variant leaves this rank without work."""
    world = cached_world()
    n = world.size
    found: dict[str, Any] = {"local": None, "ulysses": n, "ring": 1, "allgather": 1}
    if n > 2 and n % 2 == 0:
        found["hybrid"] = 2
    for scheme, inner in found.items():
        if inner is not None:
            found[scheme] = block_context(world, [length], scheme, inner)
    if world.rank == 0:
        found["local"] = block_context(world, [length], "local", 1, degree=1)
    return found


def work(
    attend: Callable[..., Tensor], positions: Tensor, model: TinyModel | None, shape: dict[str, Any]
) -> Callable[[], None]:
    """One forward and backward over the tokens at these positions, with inputs of its own."""
    t, dim, dtype = len(positions), shape["dim"], shape["dtype"]
    if model is not None:
        ids, weights = torch.randint(0, 64, (t,)), torch.ones(t)

        def step() -> None:
            torch.autograd.backward(weighted_loss_sum(model(ids, positions, attend), ids, weights))

        return step
    heads = (shape["heads"], shape["kv_heads"], shape["kv_heads"])
    q, k, v = (torch.randn(t, h, dim, dtype=dtype).requires_grad_() for h in heads)

    def call() -> None:
        out = attend(q, k, v)
        torch.autograd.backward(out, torch.ones_like(out))

    return call


def case(
    *,
    length: int,
    heads: int,
    kv_heads: int,
    dim: int,
    repeats: int,
    dtype: str,
    layers: int,
    only: list[str],
) -> dict[str, Any]:
    """Runs on every rank: seconds and exposed seconds per variant and repeat."""
    import plain

    world, kind = cached_world(), getattr(torch, dtype)
    shape = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "dtype": kind}
    model = None
    if layers:
        model = TinyModel(
            hidden=heads * dim, layers=layers, heads=heads, kv_heads=kv_heads, dtype=kind
        )
    share = length // world.size
    mine = torch.arange(share) + share * world.rank
    runs: dict[str, Callable[[], None] | None] = {}
    for name, context in contexts(length).items():
        attend = partial(attention, placement=context)
        positions = context.position_ids if context is not None else None
        runs[name] = None if context is None else work(attend, positions, model, shape)
    runs["plain ulysses"] = work(plain.plain_ulysses, mine, model, shape)
    runs["plain ring"] = work(plain.plain_ring, mine, model, shape)
    runs = {name: run for name, run in runs.items() if not only or name in only}
    seconds: dict[str, list[float]] = {v: [] for v in runs}
    exposed: dict[str, list[float]] = {v: [] for v in runs}

    def heard(kind: str, begin_ns: int, end_ns: int) -> None:
        plain.waited[0] += (end_ns - begin_ns) / 1e9

    world.wire.listener = heard
    for repeat in range(repeats + 1):  # the first warms up
        for name, run in runs.items():
            if model is not None:
                model.zero_grad()
            dist.barrier()
            plain.waited[0], begin = 0.0, time.perf_counter()
            if run is not None:
                run()
            elapsed = time.perf_counter() - begin
            if repeat:
                seconds[name].append(elapsed)
                exposed[name].append(plain.waited[0])
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
    parser.add_argument("--layers", type=int, default=0, help="of a decoder; 0: attention alone")
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
                layers=a.layers, only=[v for v in a.variants.split(",") if v],
            )  # fmt: skip
            rows += _rows(length, results)
    finally:
        pool.close()
    print("| length | variant | tokens/s | exposed | " + " | ".join(f"/ {p}" for p in PLAIN) + " |")
    print("| --- | --- | --- | --- | --- | --- |")
    for r in rows:
        ratios = " | ".join(f"{x:.2f}x" if x else "" for x in (r[f"vs_{p}"] for p in PLAIN))
        print("| {length} | {variant} | {tokens_per_s:.0f} | {exposed:.1%} | ".format(**r), end="")
        print(f"{ratios} |")
    if a.json:
        about = {"command": " ".join(sys.argv), "machine": platform.processor() or "cpu",
                 "torch": torch.__version__, "ranks": a.ranks, "dtype": a.dtype, "layers": a.layers,
                 "load": os.getloadavg()[0]}  # fmt: skip
        a.json.write_text(json.dumps({"schema": "mdcp.bench-schemes/1", **about, "rows": rows}))


def _rows(length: int, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    medians, shares = {}, {}
    for name in results[0]["seconds"]:
        slowest = [max(x) for x in zip(*(r["seconds"][name] for r in results), strict=True)]
        medians[name] = statistics.median(slowest)
        shares[name] = max(sum(r["exposed"][name]) / sum(r["seconds"][name]) for r in results)
    return [
        {
            "length": length,
            "variant": name,
            "seconds": seconds,
            "tokens_per_s": length / seconds,
            "exposed": shares[name],
            **{f"vs_{p}": medians[p] / seconds if p in medians else None for p in PLAIN},
        }
        for name, seconds in medians.items()
    ]


if __name__ == "__main__":
    main()
