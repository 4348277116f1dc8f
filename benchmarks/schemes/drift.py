"""bf16 error of every scheme on degrees 1 to 8, relative to that of one rank.

    python benchmarks/schemes/drift.py --lengths 512,100,31 --seeds 3

Inputs are bfloat16; the reference is dense attention of the same numbers in float64, in one
process. An error is the root mean square over a tensor divided by that of the reference. A cell is
the largest ratio, over out, dq, dk and dv, of the error to that of one rank with the same heads:
1.00 is no drift. Heads are 8 with 2 KV heads; where an all-to-all cannot cut these, 2 x inner with
inner KV heads. Hybrid: the worst of its inner degrees.
"""

from __future__ import annotations

import argparse
from typing import Any

from megatron_dcp.testing.gradients import rms_errors
from megatron_dcp.testing.pool import WorkerPool

CASE = "megatron_dcp.testing.cases.attention:scheme_error"
RANKS = 8
TENSORS = ("out", "dq", "dk", "dv")
Errors = dict[str, float]


def heads_for(inner: int) -> dict[str, int]:
    """Head counts that an all-to-all over `inner` ranks can cut."""
    return (
        {"heads": 8, "kv_heads": 2} if 8 % inner == 0 else {"heads": 2 * inner, "kv_heads": inner}
    )


def columns(degree: int) -> dict[str, list[int]]:
    """Schemes of a degree with their inner degrees."""
    hybrid = [u for u in range(2, degree) if degree % u == 0]
    return {"ring": [1], "allgather": [1], "ulysses": [degree], "hybrid": hybrid}


def errors(pool: WorkerPool, lengths: list[int], seeds: int, **case: Any) -> Errors:
    """Relative RMS error of each tensor over ranks and seeds."""
    squares: list[Any] = []
    for seed in range(seeds):
        found = pool.run(RANKS, CASE, lengths=lengths, seed=seed, dtype="bfloat16", dim=64, **case)
        squares += [r["squares"] for r in found if r is not None]
    return rms_errors(squares)


def main() -> None:
    """Print one row per degree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default="512,100,31")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--degrees", default="2,3,4,5,6,7,8")
    a = parser.parse_args()
    lengths = [int(n) for n in a.lengths.split(",")]
    pool = WorkerPool(limit=RANKS, timeout_s=1800)
    alone: dict[tuple[int, int], Errors] = {}

    def baseline(heads: dict[str, int]) -> Errors:
        key = (heads["heads"], heads["kv_heads"])
        if key not in alone:
            alone[key] = errors(pool, lengths, a.seeds, scheme="local", degree=1, **heads)
        return alone[key]

    def cell(degree: int, scheme: str, inners: list[int]) -> str:
        """The worst ratio and its tensor."""
        ratios = []
        for inner in inners:
            heads = heads_for(inner)
            case = {"scheme": scheme, "inner": inner, "degree": degree, **heads}
            found, one = errors(pool, lengths, a.seeds, **case), baseline(heads)
            ratios += [(found[n] / one[n], n) for n in TENSORS]
        return "{:.3f} ({})".format(*max(ratios)) if ratios else ""

    try:
        one = baseline(heads_for(1))
        print("one rank, 8 heads, 2 KV heads: " + ", ".join(f"{n} {one[n]:.2e}" for n in TENSORS))
        names = list(columns(2))
        print("\n| degree | " + " | ".join(names) + " |\n|" + " --- |" * (len(names) + 1))
        for degree in map(int, a.degrees.split(",")):
            row = [cell(degree, s, u) for s, u in columns(degree).items()]
            print(f"| {degree} | " + " | ".join(row) + " |", flush=True)
    finally:
        pool.close()


if __name__ == "__main__":
    main()
