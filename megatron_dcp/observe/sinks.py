"""Where the metrics of a running training go: console table, TensorBoard, Weights & Biases.

A sink takes `{name: number}` once per step on rank 0. Names are grouped by a slash, units in the
name: `time/step_ms`, `share/idle`, `plan/gap`, `rate/tokens_per_s`. Optional packages are imported
when their sink is opened; where one is missing, opening it is an error that says what to install.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from megatron_dcp.errors import ConfigError
from megatron_dcp.observe.shares import Shares
from megatron_dcp.plan import StepPlan

SINKS = ("console", "tensorboard", "wandb")


class Sink(Protocol):
    """Takes the metrics of one step."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def step_metrics(plan: StepPlan, shares: Shares, *, loss: float | None = None) -> dict[str, float]:
    """Metrics of one measured step. prediction_error = predicted / measured - 1, signed."""
    measured_us = shares.step_s * 1e6
    out = {
        "time/step_ms": measured_us / 1e3,
        "time/predicted_ms": plan.makespan_us / 1e3,
        "time/prediction_error": plan.makespan_us / measured_us - 1.0 if measured_us else 0.0,
        "rate/tokens_per_s": shares.tokens / shares.step_s if shares.step_s else 0.0,
        "share/idle": shares.idle,
        "share/comm": shares.comm,
        "plan/gap": plan.gap,
        "plan/placements": float(len(plan.placements)),
        "plan/slots": float(plan.slots),
        "plan/largest_degree": float(max((p.degree for p in plan.placements), default=0)),
    }
    if "planner_us" in plan.info:
        out["plan/planner_ms"] = float(plan.info["planner_us"]) / 1e3
    if shares.peaks:
        out["memory/held_mb"] = max(shares.peaks) / 1e6
    if loss is not None:
        out["loss"] = loss
    return out


class ConsoleSink:
    """A table of the last `every` steps, printed every `every` steps to stderr."""

    COLUMNS = (
        ("time/step_ms", "step ms", "{:,.1f}"), ("time/predicted_ms", "predicted", "{:,.1f}"),
        ("rate/tokens_per_s", "tokens/s", "{:,.0f}"), ("share/idle", "idle", "{:.1%}"),
        ("share/comm", "comm", "{:.1%}"), ("plan/planner_ms", "plan ms", "{:.2f}"),
        ("loss", "loss", "{:.4f}"),
    )  # fmt: skip

    def __init__(self, every: int = 10, file: TextIO | None = None) -> None:
        if every < 1:
            raise ConfigError(f"console metrics every {every} steps: use a number >= 1")
        self.every = every
        self._file = file or sys.stderr
        self._rows: list[tuple[int, Mapping[str, float]]] = []

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._rows.append((step, dict(metrics)))
        if len(self._rows) >= self.every:
            self._flush()

    def _flush(self) -> None:
        from rich.console import Console
        from rich.table import Table

        if not self._rows:
            return
        table = Table(header_style="bold")
        table.add_column("step", justify="right")
        for _, title, _ in self.COLUMNS:
            table.add_column(title, justify="right", no_wrap=True)
        for step, m in self._rows:
            cells = [f.format(m[key]) if key in m else "-" for key, _, f in self.COLUMNS]
            table.add_row(str(step), *cells)
        Console(file=self._file, width=100, highlight=False).print(table)
        self._rows = []

    def close(self) -> None:
        self._flush()


class TensorBoardSink:
    """Scalars in an event file under `folder`, written by the tensorboard package (no torch)."""

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.summary import Writer
        except ImportError as error:
            raise ConfigError(
                "metrics sink tensorboard: package tensorboard is not installed "
                f"({error}); pip install tensorboard, or leave the sink out"
            ) from error
        folder.mkdir(parents=True, exist_ok=True)
        self._writer: Any = Writer(str(folder))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.flush()
        self._writer.close()


class WandbSink:
    """A W&B run. mode: what wandb.init takes (`online`, `offline`, `disabled`)."""

    def __init__(
        self, folder: Path, config: Mapping[str, Any], *, project: str, mode: str = "offline"
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                "metrics sink wandb: package wandb is not installed "
                f"({error}); pip install wandb, or leave the sink out"
            ) from error
        folder.mkdir(parents=True, exist_ok=True)
        start: Any = wandb.init  # typed only where wandb is installed
        self._run: Any = start(project=project, dir=str(folder), config=dict(config), mode=mode)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def check_sinks(names: Sequence[str]) -> None:
    """Refuse names that are no sink."""
    unknown = sorted(set(names) - set(SINKS))
    if unknown:
        raise ConfigError(f"metrics sinks {unknown}: known are {', '.join(SINKS)}")


def open_sinks(
    names: Sequence[str], run: Path, config: Mapping[str, Any], *, every: int = 10
) -> list[Sink]:
    """Open sinks by name; files go under the run directory."""
    check_sinks(names)
    opened: list[Sink] = []
    for name in names:
        if name == "console":
            opened.append(ConsoleSink(every))
        elif name == "tensorboard":
            opened.append(TensorBoardSink(run / "tensorboard"))
        else:
            opened.append(WandbSink(run, config, project="megatron-dcp"))
    return opened
