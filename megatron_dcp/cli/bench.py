"""`mdcp bench planner | attention | end-to-end`: side-by-side tables as text or JSON.

Each benchmark is a module of its own, imported only when it is asked for, so that `planner` never
pays for torch. All print rows of one form, `mdcp.bench/1`.
"""

from __future__ import annotations

import sys
from importlib import import_module, util

BENCHMARKS = {
    "planner": ("bench_planner", "planner time, gap to the bound, makespan of every strategy"),
    "attention": ("bench_attention", "attention schemes and kernels against references"),
    "end-to-end": ("bench_end_to_end", "training steps per strategy on this machine"),
}


def _usage() -> str:
    lines = ["usage: mdcp bench BENCHMARK [options]", ""]
    return "\n".join(lines + [f"  {name:<11} {text}" for name, (_, text) in BENCHMARKS.items()])


def main(argv: list[str]) -> int:
    if argv and argv[0] in ("-h", "--help"):
        print(_usage())
        return 0
    if not argv or argv[0] not in BENCHMARKS:
        found = f"unknown benchmark {argv[0]!r}" if argv else "no benchmark given"
        print(f"mdcp bench: {found}\n\n{_usage()}", file=sys.stderr)
        return 2
    name = f"megatron_dcp.cli.{BENCHMARKS[argv[0]][0]}"
    if util.find_spec(name) is None:
        print(f"mdcp bench: {argv[0]} is not part of this installation", file=sys.stderr)
        return 2
    return int(import_module(name).main(argv[1:]))
