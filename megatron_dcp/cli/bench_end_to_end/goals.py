"""Rows and verdicts of the benchmark from the summaries of its runs.

Goals stand where the project states one: `dcp` across nodes under the memory budget at least 1.2x
`packed:2`, 1.08x `static` and no slower than the best published strategy, 1.4x `packed:2` without a
budget; 32 virtual ranks at least 1.5x `packed` and 1.15x the best published strategy; on an unpaced
link never below any strategy by more than the spread of the ratio over the repeats.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_dcp.cli.bench_end_to_end.suite import Run
from megatron_dcp.cli.bench_rows import Row

PUBLISHED = ("dcp-inter", "dcp-intra", "megatron", "flexsp")
BASELINES = ("static", "bucket", "packed:2", "packed")
OURS = "dcp"
# Share columns and other measures of a strategy: (key, metric, unit, factor).
_MEASURES = (
    ("idle", "idle", "%", 100.0),
    ("comm", "communication", "%", 100.0),
    ("recompute", "recompute", "%", 100.0),
    ("planner_ms", "planner", "ms", 1.0),
    ("exposed_ms", "planner exposed", "ms", 1.0),
    ("peak_bytes", "peak memory", "MB", 1e-6),
    ("prediction_error_of_mean", "prediction off", "%", 100.0),
)


def rows(runs: Sequence[Run]) -> Iterator[Row]:
    for run in runs:
        strategies = run.summary.to_object()["strategies"]
        yield from goals(run, strategies)
        for name, s in strategies.items():
            yield from _measures(f"{run.folder} {name}", s)


def _measures(case: str, s: Mapping[str, Any]) -> Iterator[Row]:
    rate = s["tokens_per_s"]
    against = [b for b in BASELINES if b in s["speedup_vs"]]
    for base in against or [""]:
        ratio = round(s["speedup_vs"][base]["mean"], 4) if base else None
        yield Row(case=case, metric="throughput", unit="tokens/s", value=round(rate["mean"], 1),
                  baseline=base, ratio=ratio)  # fmt: skip
    yield Row(case=case, metric="spread", unit="tokens/s", value=round(rate["std"], 1))
    for key, metric, unit, factor in _MEASURES:
        if key in s:
            yield Row(case=case, metric=metric, unit=unit, value=round(factor * s[key], 3))


def goals(run: Run, strategies: Mapping[str, Any]) -> Iterator[Row]:
    """The goals of one run, for the strategies that it has."""
    if OURS not in strategies:
        return
    for base, bar in _bars(run.setting, strategies):
        ratio = strategies[OURS]["speedup_vs"][base]
        measured = round(ratio["mean"], 4)
        limit = round(1.0 - ratio["std"], 4) if bar is None else bar
        yield Row(case=run.folder, metric=f"speed of {OURS}", unit="x", value=measured,
                  baseline=base, ratio=measured, bar=limit, ok=measured >= limit)  # fmt: skip


def _bars(setting: str, strategies: Mapping[str, Any]) -> list[tuple[str, float | None]]:
    """(baseline, least ratio); None: one less the spread of the ratio."""
    others = [n for n in strategies if n != OURS]
    published = [n for n in others if n.partition(":")[0] in PUBLISHED]
    best = max(published, key=lambda n: strategies[n]["tokens_per_s"]["mean"], default="")
    table: dict[str, list[tuple[str, float | None]]] = {
        "unpaced": [(n, None) for n in others],
        "7b-cross-node": [("packed:2", 1.2), ("static", 1.08), (best, 1.0)],
        "7b-cross-node-no-budget": [("packed:2", 1.4)],
        "virtual32": [("packed", 1.5), (best, 1.15)],
    }
    return [(n, bar) for n, bar in table.get(setting, []) if n in others]
