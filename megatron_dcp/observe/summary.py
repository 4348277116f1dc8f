"""`summary.json` of a run directory (`mdcp.run/1`) and the table that a person reads.

A run compares strategies on the same samples in interleaved repeats (A B C A B C ...), so a ratio
between two strategies is the mean over repeats of the ratio inside one repeat: slow drift of the
machine cancels.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_dcp.errors import ConfigError
from megatron_dcp.observe.shares import Shares
from megatron_dcp.plan import StepPlan

SCHEMA = "mdcp.run/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One measured step of one strategy. Shares are fractions of rank-time."""

    repeat: int
    tokens: int
    step_s: float
    predicted_s: float
    idle: float
    comm: float
    loss: float | None = None

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
        )


@dataclass(slots=True)
class RunSummary:
    """Collects StepRecords per strategy and turns them into the summary object."""

    what: str
    config: Mapping[str, Any]
    records: dict[str, list[StepRecord]] = field(default_factory=dict)

    def add(self, strategy: str, record: StepRecord) -> None:
        self.records.setdefault(strategy, []).append(record)

    def to_object(self) -> dict[str, Any]:
        names = list(self.records)
        return {
            "schema": SCHEMA,
            "what": self.what,
            "config": dict(self.config),
            "strategies": {n: self._strategy(n, names) for n in names},
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


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


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
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(obj, dict) or obj.get("schema") != SCHEMA:
        raise ConfigError(f"{path}: not a {SCHEMA} file")
    return obj


def table_lines(obj: Mapping[str, Any]) -> list[str]:
    """The comparison as aligned text, one row per strategy; speedups are against the first."""
    strategies: Mapping[str, Any] = obj["strategies"]
    base = next(iter(strategies))
    head = ("strategy", "tokens/s", "step s", "predicted s", "off", "idle", "comm", "loss",
            f"vs {base}")  # fmt: skip
    rows = [head]
    for name, s in strategies.items():
        speed = s["speedup_vs"].get(base)
        rows.append((
            name,
            _spread(s["tokens_per_s"], 0),
            _spread(s["step_s"], 2),
            f"{s['predicted_s']['mean']:.2f}",
            f"{s['prediction_error_of_mean']:.1%}",
            f"{s['idle']:.1%}",
            f"{s['comm']:.1%}",
            f"{s['loss'][-1]:.5f}" if s["loss"] else "-",
            f"{_spread(speed, 2)}x" if speed else "1.00x",
        ))  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return ["  ".join(c.ljust(w) if i == 0 else c.rjust(w)
                      for i, (c, w) in enumerate(zip(row, widths, strict=True)))
            for row in rows]  # fmt: skip


def _spread(value: Mapping[str, float], digits: int) -> str:
    return f"{value['mean']:.{digits}f} ± {value['std']:.{digits}f}"
