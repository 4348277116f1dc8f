"""Print a results page from run directories: `python benchmarks/end_to_end/record.py RUN_DIR...`

A folder of `mdcp bench end-to-end` (one with a bench.json) stands for all its runs.

Names the hardware, the commit and the command; every number is read from a `summary.json`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_dcp.observe.summary import hardware, load_summary, table_cells


def commit() -> str:
    """The commit of the checkout, marked when it has changes."""
    git = ["git", "-C", str(Path(__file__).parent)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True,
                          check=True).stdout.strip()  # fmt: skip
    changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True,
                             text=True, check=True).stdout  # fmt: skip
    return head + (" with changes" if changed else "")


def table(summary: Mapping[str, Any]) -> list[str]:
    """Rows of one run as a Markdown table; speedups over the fixed baselines, else over all."""
    names = list(summary["strategies"])
    fixed = [n for n in names if n.partition(":")[0] in ("packed", "static", "bucket")]
    head, *rows = table_cells(summary, fixed or names[:-1])
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines] + [
        f"\n`{name}` has no row: {why}" for name, why in summary.get("failed", {}).items()
    ]


def verdicts(bench: Mapping[str, Any]) -> list[str]:
    """The goals of a `mdcp bench end-to-end` run as a Markdown table."""
    lines = ["| run | goal | measured | at least | |", "| --- | --- | ---: | ---: | --- |"]
    for r in bench["rows"]:
        if r["bar"] is not None:
            held = "held" if r["ok"] else "**missed**"
            goal = f"{r['metric']} over `{r['baseline']}`"
            lines.append(f"| {r['case']} | {goal} | {r['ratio']:.2f}x | {r['bar']:.2f}x | {held} |")
    return lines


def headroom(folder: Path) -> str:
    """Predicted time of every strategy's plans over their lower bounds: what no plan can beat."""
    makespan: dict[str, int] = {}
    bound: dict[str, int] = {}
    for path in sorted((folder / "plans").glob("*.json")):
        plan = json.loads(path.read_text())
        name = plan["strategy"]
        makespan[name] = makespan.get(name, 0) + plan["makespan_us"]
        bound[name] = bound.get(name, 0) + plan["lower_bound_us"]
    over = ", ".join(f"`{n}` {makespan[n] / bound[n]:.3f}" for n in makespan)
    return f"Makespans of the plans over their lower bounds: {over}"


def show(folder: Path) -> None:
    """One run, or every run of a benchmark folder with its goals."""
    if (folder / "bench.json").exists():
        bench = json.loads((folder / "bench.json").read_text())
        if any(r["bar"] is not None for r in bench["rows"]):
            print("## Goals\n\n" + "\n".join(verdicts(bench)) + "\n")
        for name in bench["runs"]:
            show(folder / name)
        return
    summary = load_summary(folder)
    print(f"## {summary['what']}\n\n`{folder}/summary.json`, configuration:")
    print(", ".join(f"{k} {v}" for k, v in summary["config"].items() if v is not None) + "\n")
    print("\n".join(table(summary)) + "\n")
    print(headroom(folder) + "\n")


def main(folders: list[str]) -> None:
    if not folders:
        raise SystemExit(__doc__)
    print(f"Hardware: {hardware()}. Commit: {commit()}.\n")
    for folder in folders:
        show(Path(folder))


if __name__ == "__main__":
    main(sys.argv[1:])
