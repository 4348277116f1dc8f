"""`mdcp bench planner`: planner time, gap to the lower bound, makespans of other strategies.

Time is one call of the C++ planner: reading the request, bound, whole search, prices, replay; not
the making of Python's Placement objects. Seed s of a file is
`numpy.random.default_rng(s).choice(lengths, n, replace=n > len(lengths))`. `--bars` holds each
value against its bar (docs/planner.md) and exits with 1 when one falls short.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from megatron_dcp import _planner
from megatron_dcp.cli.bench_rows import Row, text_row
from megatron_dcp.cost import resolve
from megatron_dcp.data.lengths import read_lengths
from megatron_dcp.errors import ConfigError, MdcpError
from megatron_dcp.plan import Topology, Workload
from megatron_dcp.planner import PlanRequest, make_plan
from megatron_dcp.planner.registry import find_strategy

ASYNC_SIZES = ("512/64", "2048/256", "4096/1024", "16384/1024", "65536/4096", "128/64", "2048/1024",
               "48/64", "768/1024")  # fmt: skip
LOCKSTEP_SIZES = ("512/64", "2048/256", "4096/1024")
FILES = ("wiki", "prolong", "heavy")
P50_BARS = {("async", "4096/1024"): 3.0, ("async", "65536/4096"): 100.0,
            ("lockstep", "512/64"): 3.0, ("lockstep", "4096/1024"): 30.0}  # fmt: skip
P99_BARS = {("async", "4096/1024"): 10.0}


def _row(case: str, metric: str, unit: str, value: float, bar: float | None) -> Row:
    ok = None if bar is None else value <= bar
    return Row(case=case, metric=metric, unit=unit, value=round(value, 4), bar=bar, ok=ok)


def gap_bar(name: str, samples: int, ranks: int) -> float | None:
    """Bar of the mean gap in percent, by samples per rank."""
    if samples >= 8 * ranks:
        return 1.5 if name == "wiki" else 1.0
    for share, bar in ((4, 2.0), (2, 4.0), (0.5, 10.0)):
        if samples >= share * ranks:
            return bar
    return None


def _request(lengths: Sequence[int], ranks: int, mode: str) -> PlanRequest:
    return PlanRequest(
        workload=Workload(lengths=tuple(lengths)),
        topology=Topology(data_ranks=ranks, ranks_per_node=min(8, ranks)),
        profile=resolve("a100-gpt7b"),
        lockstep=ranks if mode == "lockstep" else 1,
    )


def _draw(pool: Sequence[int], samples: int, seed: int) -> list[int]:
    rng = np.random.default_rng(seed)
    drawn = rng.choice(np.asarray(pool), samples, replace=samples > len(pool))
    return [int(x) for x in drawn]


def _plan_rows(
    name: str, size: str, mode: str, pool: Sequence[int], args: argparse.Namespace
) -> Iterator[Row]:
    samples, ranks = (int(x) for x in size.split("/"))
    seeds = max(1, args.seeds // 5) if samples > 20_000 else args.seeds
    repeats = max(3, args.repeats // 5) if samples > 20_000 else args.repeats
    case = f"{mode} {name} {size}"
    requests = [_request(_draw(pool, samples, s), ranks, mode) for s in range(seeds)]
    gaps, times = [], []
    for k in range(max(seeds, repeats)):
        wall, cpu = time.perf_counter_ns(), time.process_time_ns()
        plan = _planner.plan(requests[k % seeds])
        spent = time.process_time_ns() - cpu if args.cpu_time else time.perf_counter_ns() - wall
        times.append(spent / 1e6)
        if k < seeds:
            gaps.append(100.0 * (plan.makespan_us / plan.lower_bound_us - 1.0))
    bar = gap_bar(name, samples, ranks) if mode == "async" else None
    yield _row(case, "gap mean", "%", statistics.fmean(gaps), bar)
    yield _row(case, "gap max", "%", max(gaps), None)
    yield _row(case, "planner p50", "ms", statistics.median(times), P50_BARS.get((mode, size)))
    p99 = float(np.quantile(times, 0.99))
    yield _row(case, "planner p99", "ms", p99, P99_BARS.get((mode, size)))


def _strategy_rows(
    name: str, size: str, mode: str, pool: Sequence[int], strategies: Sequence[str]
) -> Iterator[Row]:
    samples, ranks = (int(x) for x in size.split("/"))
    request = _request(_draw(pool, samples, 0), ranks, mode)
    ours = make_plan(request).makespan_us
    for strategy in strategies:
        case = f"{mode} {name} {size}"
        try:
            theirs = make_plan(request, strategy).makespan_us
        except MdcpError as error:
            print(f"mdcp bench: {case} {strategy}: {error}", file=sys.stderr)
            continue
        ratio = round(ours / theirs, 4)
        bar = 0.92 if mode == "lockstep" and strategy.startswith("flexsp") else None
        yield Row(
            case=case, metric="makespan dcp", unit="ms", value=ours / 1e3, baseline=strategy,
            ratio=ratio, bar=bar, ok=None if bar is None else ratio <= bar,
        )  # fmt: skip


def rows(args: argparse.Namespace) -> Iterator[Row]:
    folder = Path(args.lengths)
    for name in args.files.split(","):
        pool = read_lengths(folder / f"{name}_16384.txt")
        wanted = {"async": args.sizes.split(","), "lockstep": args.lockstep_sizes.split(",")}
        for mode, sizes in wanted.items():
            for size in filter(None, sizes):
                yield from _plan_rows(name, size, mode, pool, args)
        compared = list(filter(None, args.strategies.split(",")))
        if compared:
            for mode in ("async", "lockstep"):
                yield from _strategy_rows(name, args.strategies_size, mode, pool, compared)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="mdcp bench planner", description=__doc__.split("\n\n")[0])
    p.add_argument("--lengths", default="tests/data/lengths", help="folder of NAME_16384.txt")
    p.add_argument("--files", default=",".join(FILES))
    p.add_argument("--sizes", default=",".join(ASYNC_SIZES), help="async: samples/ranks,...")
    p.add_argument("--lockstep-sizes", default=",".join(LOCKSTEP_SIZES))
    p.add_argument("--seeds", type=int, default=20)
    p.add_argument("--repeats", type=int, default=50, help="timed runs per case")
    p.add_argument("--strategies", default="static,megatron,flexsp:10",
                   help="compared on --strategies-size; empty: none")  # fmt: skip
    p.add_argument("--strategies-size", default="512/64")
    p.add_argument("--cpu-time", action="store_true",
                   help="CPU time of the process instead of wall time (busy machines)")  # fmt: skip
    p.add_argument("--bars", action="store_true", help="exit with 1 when a bar is missed")
    p.add_argument("--json", action="store_true")
    return p


def _check(args: argparse.Namespace) -> None:
    """Refuse what cannot run before anything does. Raises ConfigError."""
    sizes = ",".join((args.sizes, args.lockstep_sizes, args.strategies_size)).split(",")
    for size in filter(None, sizes):
        samples, _, ranks = size.partition("/")
        if not (samples.isdecimal() and ranks.isdecimal() and int(samples) and int(ranks)):
            raise ConfigError(f"size {size!r}: use SAMPLES/RANKS, two integers >= 1, as 512/64")
    for strategy in filter(None, args.strategies.split(",")):
        find_strategy(strategy)
    for name in args.files.split(","):
        file = Path(args.lengths) / f"{name}_16384.txt"
        if not file.is_file():
            raise ConfigError(
                f"no {file}: --lengths is the folder of NAME_16384.txt for each of --files "
                "(tests/data/lengths of a source checkout)"
            )


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    _check(args)
    if args.seeds < 1 or args.repeats < 1:
        raise ConfigError(f"--seeds {args.seeds}, --repeats {args.repeats}: both must be >= 1")
    done: list[Row] = []
    for row in rows(args):
        done.append(row)
        print(text_row(row), file=sys.stderr if args.json else sys.stdout, flush=True)
    missed = [r for r in done if r.ok is False]
    if args.json:
        print(json.dumps({"schema": "mdcp.bench/1", "rows": [asdict(r) for r in done]}))
    else:
        held = sum(1 for r in done if r.ok)
        print(f"{held} bars held, {len(missed)} missed")
    return 1 if args.bars and missed else 0
