"""`summary.json` of a run directory (`mdcp.run/1`) and the table that a person reads.

A run compares strategies on the same samples in interleaved repeats (A B C A B C ...), so a ratio
between two strategies is the mean over repeats of the ratio inside one repeat: slow drift of the
machine cancels.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from megatron_dcp.errors import ConfigError
from megatron_dcp.observe.shares import Shares, peak_by_rank
from megatron_dcp.plan import StepPlan

SCHEMA = "mdcp.run/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One measured step of one strategy. Shares are fractions of rank-time.

    recompute: share of rank-time that the simulator gives to recomputation. planner_ms: making the
    plan. exposed_ms: what is left of it when it is made while the step before runs. peak_bytes:
    rise of the resident set in a step, largest rank. held: most bytes that each rank held in it.
    """

    repeat: int
    tokens: int
    step_s: float
    predicted_s: float
    idle: float
    comm: float
    loss: float | None = None
    recompute: float | None = None
    planner_ms: float | None = None
    exposed_ms: float | None = None
    peak_bytes: int | None = None
    held: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, plan: StepPlan, shares: Shares, *, loss: float | None, repeat: int = 0,
        tail_us: float = 0.0,
    ) -> StepRecord:  # fmt: skip
        """A measured step. tail_us: what is expected to follow the makespan, us."""
        return cls(
            repeat=repeat,
            tokens=plan.workload.tokens,
            step_s=shares.step_s,
            predicted_s=(plan.makespan_us + tail_us) / 1e6,
            idle=shares.idle,
            comm=shares.comm,
            loss=loss,
            held=shares.peaks,
        )


@dataclass(slots=True)
class RunSummary:
    """Collects StepRecords per strategy and turns them into the summary object.

    failed: strategies that could not go on, with the reason; what they did before is not shown.
    """

    what: str
    config: Mapping[str, Any]
    records: dict[str, list[StepRecord]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def add(self, strategy: str, record: StepRecord) -> None:
        self.records.setdefault(strategy, []).append(record)

    def peak(self, strategy: str, peak_bytes: int | None) -> None:
        """What a step of its own found, beside the timed ones."""
        last = self.records[strategy][-1]
        self.records[strategy][-1] = replace(last, peak_bytes=peak_bytes)

    def to_object(self) -> dict[str, Any]:
        names = [n for n in self.records if n not in self.failed]
        return {
            "schema": SCHEMA,
            "what": self.what,
            "config": dict(self.config),
            "versions": versions(),
            "hardware": hardware(),
            "command": shlex.join(sys.argv),
            "strategies": {n: self._strategy(n, names) for n in names},
            **({"failed": self.failed} if self.failed else {}),
        }

    def _strategy(self, name: str, others: Sequence[str]) -> dict[str, Any]:
        records = self.records[name]
        rate = self._rates(name)
        errors = [abs(r.predicted_s / r.step_s - 1.0) for r in records]
        return {
            "tokens_per_s": mean_std(list(rate.values())),
            "step_s": mean_std([r.step_s for r in records]),
            "predicted_s": mean_std([r.predicted_s for r in records]),
            "idle": _mean([r.idle for r in records]),
            "comm": _mean([r.comm for r in records]),
            "loss": [r.loss for r in records if r.loss is not None],
            "prediction_error": _mean(errors),
            "prediction_error_of_mean": abs(
                sum(r.predicted_s for r in records) / sum(r.step_s for r in records) - 1.0
            ),
            **_means(records, ("recompute", "planner_ms", "exposed_ms")),
            **_largest(records, "peak_bytes"),
            **_largest_by_rank(records),
            "speedup_vs": {
                other: mean_std([rate[k] / base[k] for k in sorted(rate.keys() & base.keys())])
                for other in others
                if other != name
                for base in [self._rates(other)]
            },
        }

    def _rates(self, name: str) -> dict[int, float]:
        """tokens/s of each repeat."""
        tokens: dict[int, int] = {}
        seconds: dict[int, float] = {}
        for r in self.records[name]:
            tokens[r.repeat] = tokens.get(r.repeat, 0) + r.tokens
            seconds[r.repeat] = seconds.get(r.repeat, 0.0) + r.step_s
        return {k: tokens[k] / seconds[k] for k in tokens}

    def write(self, run: Path) -> Path:
        """Write `<run>/summary.json` in one move: readers never see half a file."""
        run.mkdir(parents=True, exist_ok=True)
        path, part = run / "summary.json", run / "summary.json.part"
        part.write_text(json.dumps(self.to_object(), indent=1) + "\n")
        part.replace(path)
        return path


def versions() -> dict[str, str]:
    """Versions of what a run depends on, as far as it is installed."""
    out = {"python": platform.python_version()}
    for name in ("megatron-dcp", "torch", "numpy"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            out[name] = metadata.version(name)
    return out


def hardware() -> str:
    """Processor name, cores and memory of this machine."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{name}, {os.cpu_count()} cores, {gib:.0f} GiB"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _told(records: Sequence[StepRecord], name: str) -> list[float]:
    return [float(v) for r in records if (v := getattr(r, name)) is not None]


def _means(records: Sequence[StepRecord], names: Sequence[str]) -> dict[str, float]:
    """Means of the measures that these records have."""
    return {n: _mean(told) for n in names if (told := _told(records, n))}


def _largest(records: Sequence[StepRecord], name: str) -> dict[str, float]:
    told = _told(records, name)
    return {name: max(told)} if told else {}


def _largest_by_rank(records: Sequence[StepRecord]) -> dict[str, list[int]]:
    """Most bytes that each rank held in any step, where they told."""
    held = peak_by_rank(r.held for r in records)
    return {"held_bytes": held} if held else {}


def mean_std(values: Sequence[float]) -> dict[str, float]:
    """Mean and sample standard deviation (0 for one value)."""
    mean = _mean(values)
    if len(values) < 2:
        return {"mean": mean, "std": 0.0}
    return {
        "mean": mean,
        "std": math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1)),
    }


def load_summary(run: str | Path) -> dict[str, Any]:
    """Read `<run>/summary.json`; ConfigError when it is not one."""
    path = Path(run) / "summary.json"
    try:
        obj = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(
            f"no summary.json in {path.parent}: not a run directory, its run ended before it wrote "
            "one, or it is a run of `mdcp train --train-steps` without --metrics"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(obj, dict) or obj.get("schema") != SCHEMA:
        raise ConfigError(f"{path}: not a {SCHEMA} file")
    strategies = obj.get("strategies")
    if not isinstance(strategies, dict) or not strategies:
        raise ConfigError(f"{path}: no strategy in it; the file is damaged, or nothing was run")
    for name, found in strategies.items():
        if (wrong := _wrong_key(found)) is not None:
            raise ConfigError(f"{path}: strategies.{name}.{wrong} is missing or of another kind")
    return obj


def _wrong_key(strategy: Any) -> str | None:
    """The first of the keys that every reader needs which is not there as it should be."""
    if not isinstance(strategy, dict):
        return "tokens_per_s"
    for key in ("tokens_per_s", "step_s"):
        spread = strategy.get(key)
        if not isinstance(spread, dict) or not all(_number(spread.get(k)) for k in ("mean", "std")):
            return key
    numbers = (k for k in ("idle", "comm", "prediction_error") if not _number(strategy.get(k)))
    return next(numbers, None)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# Columns after the strategy's name: (head, key of the strategy's object, how its value is written).
# The second part stands only where a run measured it.
_COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("tokens/s", "tokens_per_s", lambda v: _spread(v, 0)),
    ("step s", "step_s", lambda v: _spread(v, 2)),
    ("predicted s", "predicted_s", lambda v: f"{v['mean']:.2f}"),
    ("off", "prediction_error_of_mean", lambda v: f"{v:.1%}"),
    ("idle", "idle", lambda v: f"{v:.1%}"),
    ("comm", "comm", lambda v: f"{v:.1%}"),
    ("recompute", "recompute", lambda v: f"{v:.1%}"),
    ("planner ms", "planner_ms", lambda v: f"{v:.1f}"),
    ("exposed ms", "exposed_ms", lambda v: f"{v:.1f}"),
    ("peak MB", "peak_bytes", lambda v: f"{v / 1e6:.0f}"),
    ("held MB", "held_bytes", lambda v: f"{max(v) / 1e6:.0f}"),
    ("last loss", "loss", lambda v: f"{v[-1]:.5f}" if v else "-"),
)


def table_cells(obj: Mapping[str, Any], against: Sequence[str]) -> list[list[str]]:
    """Head and one row of text per strategy; the last columns are speedups over `against`."""
    strategies: Mapping[str, Any] = obj["strategies"]
    columns = [c for c in _COLUMNS if any(c[1] in s for s in strategies.values())]
    bases = [b for b in against if b in strategies]
    rows = [["strategy", *(head for head, _, _ in columns), *(f"vs {b}" for b in bases)]]
    for name, s in strategies.items():
        cells = [write(s[key]) if key in s else "-" for _, key, write in columns]
        speeds = [s["speedup_vs"].get(b) for b in bases]
        rows.append([name, *cells, *("-" if v is None else f"{_spread(v, 2)}x" for v in speeds)])
    return rows


def table_lines(obj: Mapping[str, Any], against: Sequence[str] | None = None) -> list[str]:
    """The comparison as aligned text; speedups are over the first strategy unless told."""
    rows = table_cells(obj, [next(iter(obj["strategies"]))] if against is None else against)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(c.ljust(w) if i == 0 else c.rjust(w)
                       for i, (c, w) in enumerate(zip(row, widths, strict=True)))
             for row in rows]  # fmt: skip
    return lines + [f"{name}: no row: {why}" for name, why in obj.get("failed", {}).items()]


def _spread(value: Mapping[str, float], digits: int) -> str:
    return f"{value['mean']:.{digits}f} ± {value['std']:.{digits}f}"
