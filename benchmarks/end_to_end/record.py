"""Print a results page from run directories: `python benchmarks/end_to_end/record.py RUN_DIR...`

Names the hardware, the commit and the command; every number is read from a `summary.json`.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_dcp.observe.summary import load_summary


def hardware() -> str:
    """Processor name, cores and memory of this machine."""
    name = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            break
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{name}, {os.cpu_count()} cores, {gib:.0f} GiB"


def commit() -> str:
    """The commit of the checkout, marked when it has changes."""
    git = ["git", "-C", str(Path(__file__).parent)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True,
                          check=True).stdout.strip()  # fmt: skip
    changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True,
                             text=True, check=True).stdout  # fmt: skip
    return head + (" with changes" if changed else "")


def _pm(value: Mapping[str, float], digits: int) -> str:
    return f"{value['mean']:.{digits}f} ± {value['std']:.{digits}f}"


def table(summary: Mapping[str, Any]) -> list[str]:
    """Rows of one run as a Markdown table; speedups against every other strategy."""
    strategies: Mapping[str, Any] = summary["strategies"]
    names = list(strategies)
    head = ["strategy", "tokens/s", "step s", "predicted s", "off", "idle", "comm", "last loss"]
    head += [f"vs {n}" for n in names[:-1]]
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    for name, s in strategies.items():
        row = [
            name,
            _pm(s["tokens_per_s"], 0),
            _pm(s["step_s"], 2),
            f"{s['predicted_s']['mean']:.2f}",
            f"{s['prediction_error_of_mean']:.1%}",
            f"{s['idle']:.1%}",
            f"{s['comm']:.1%}",
            f"{s['loss'][-1]:.5f}" if s["loss"] else "-",
        ]
        for other in names[:-1]:
            ratio = s["speedup_vs"].get(other)
            row.append("-" if ratio is None else f"{_pm(ratio, 2)}x")
        lines.append("| " + " | ".join(row) + " |")
    return lines


def main(folders: list[str]) -> None:
    if not folders:
        raise SystemExit(__doc__)
    print(f"Hardware: {hardware()}. Commit: {commit()}.\n")
    for folder in folders:
        summary = load_summary(folder)
        print(f"## {summary['what']}\n\n`{folder}/summary.json`, configuration:")
        print(", ".join(f"{k} {v}" for k, v in summary["config"].items() if v is not None) + "\n")
        print("\n".join(table(summary)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
