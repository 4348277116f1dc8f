"""`mdcp report RUN_DIR`: one HTML page, PNG figures and a Perfetto trace of a finished run."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from megatron_dcp.cli.outputs import check_folder

if TYPE_CHECKING:
    from megatron_dcp.observe.run_dir import Run


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """Show where the time of a finished run went. Needs no network and no torch."""

    run: Annotated[Path, tyro.conf.Positional]
    """Directory that `mdcp train` wrote (summary.json, plans/, events-rank*.jsonl)."""
    out: Path | None = None
    """Folder for the report; default RUN_DIR/report."""
    json: bool = False
    """Print the written paths as one JSON object."""


def simulate_steps(run: Run) -> dict[str, list[tuple[float, float]]]:
    """(simulated, measured) makespan in ms of every step with a plan, by strategy; empty where the
    run kept no cost.json."""
    from megatron_dcp.cost import load
    from megatron_dcp.observe.run_dir import measured_makespan_us
    from megatron_dcp.sim import replay

    path = run.path / "cost.json"
    if not path.exists():
        return {}
    profile = load(path)
    out: dict[str, list[tuple[float, float]]] = {}
    for step in run.steps:
        measured = measured_makespan_us(step)
        if step.plan is not None and measured > 0:
            simulated = replay(step.plan, profile).makespan_us
            out.setdefault(step.strategy, []).append((simulated / 1e3, measured / 1e3))
    return out


def main(argv: list[str]) -> int:
    from megatron_dcp.observe.report import error_quantiles, write_report
    from megatron_dcp.observe.run_dir import read_run

    options = tyro.cli(ReportOptions, args=argv, prog="mdcp report")
    run = read_run(options.run)
    check_folder(options.out or options.run / "report")
    replayed = simulate_steps(run)
    print(f"{len(run.steps)} steps of {', '.join(run.strategies)}", file=sys.stderr)
    for name, points in replayed.items():
        middle, most = error_quantiles(points)
        print(
            f"{name}: simulated against measured makespan of {len(points)} steps: median error "
            f"{middle:.1%}, 90 % below {most:.1%}",
            file=sys.stderr,
        )
    written = write_report(run, options.out or options.run / "report", replayed)
    if options.json:
        print(json.dumps({"schema": "mdcp.report/1", "files": [str(p) for p in written]}))
    else:
        for path in written:
            print(path)
    return 0
