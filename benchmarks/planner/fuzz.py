"""Fuzz the C++ planner: every invariant, the bound, and never slower than `static`.

    python benchmarks/planner/fuzz.py --count 20000
    python benchmarks/planner/fuzz.py --count 1000000 --first 20000     the long one

Prints one JSON object with the counts; exit status 1 at the first broken promise, with the number
that makes it again (`--first N --count 1`).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from workloads import random_request

from megatron_dcp.errors import PlanError
from megatron_dcp.planner import make_plan


def check(seed: int, *, against_static: bool) -> str:
    """`planned` or `refused`; raises on a broken promise. make_plan checks every invariant."""
    request = random_request(seed)
    try:
        plan = make_plan(request)
    except PlanError as error:
        # The one legal refusal names the sample, its need and the budget.
        if " needs " in str(error) and str(request.budget_bytes) in str(error):
            return "refused"
        raise
    if plan.makespan_us < plan.lower_bound_us:
        raise PlanError(f"makespan {plan.makespan_us} below bound {plan.lower_bound_us}")
    if against_static:
        try:
            static = make_plan(request, "static")
        except PlanError:  # the longest sample fits no power of two
            return "planned"
        if plan.makespan_us > static.makespan_us:
            raise PlanError(f"dcp {plan.makespan_us} us, static {static.makespan_us} us")
        if static.makespan_us < plan.lower_bound_us:
            raise PlanError(f"static {static.makespan_us} below bound {plan.lower_bound_us}")
    return "planned"


def run(first: int, count: int, static_every: int, progress: bool = False) -> dict[str, float]:
    begin, counts = time.monotonic(), {"planned": 0, "refused": 0}
    for seed in range(first, first + count):
        try:
            counts[check(seed, against_static=seed % static_every == 0)] += 1
        except Exception as error:
            raise RuntimeError(f"fuzz case {seed}: {error}") from error
        if progress and (seed - first) % 10_000 == 9_999:
            print(f"{seed - first + 1} cases, {counts}", file=sys.stderr, flush=True)
    return {"cases": count, **counts, "seconds": round(time.monotonic() - begin, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--static-every", type=int, default=20, help="compare each Nth with static")
    args = parser.parse_args()
    try:
        print(json.dumps(run(args.first, args.count, args.static_every, progress=True)))
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
