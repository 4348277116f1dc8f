"""Table and figures of finished convergence runs.

    python benchmarks/convergence/report.py --runs runs/convergence --figures docs/figures

Prints markdown; exit status 1 if a bar is missed. Bars, for the loss of every step against `static`
with the same samples: float64 1e-9; float32 1e-4 and 10 times what reversing the samples of every
static step does; bfloat16 the spread over seeds (median over steps of the standard deviation).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))
from convergence.run import STRATEGIES, Variant

OTHERS = STRATEGIES[1:]
DTYPES = ("float64", "float32", "bfloat16")
COLOURS = {"static": "#000000", "dcp": "#4477AA", "dcp-intra": "#EE6677", "reversed": "#999933"}
LAST = 20  # steps of which the final loss is the mean
Runs = dict[Variant, dict[str, Any]]


def read_runs(folder: Path) -> Runs:
    """Every variant below a folder."""
    found = [json.loads(p.read_text()) for p in sorted(folder.glob("*.json"))]
    return {Variant(**x["variant"]): x for x in found}


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Largest differences of one task's losses to `static`, over all steps; NaN: not run."""

    float64: float
    float32: float
    reversed: float
    bfloat16: float
    seed_noise: float

    @property
    def missed(self) -> list[str]:
        """Bars that are not kept, also those of what was not run."""
        bars = {
            "float64": self.float64 <= 1e-9,
            "float32": self.float32 <= 1e-4,
            "float32 against reversed": self.float32 <= 10 * self.reversed,
            "bfloat16": self.bfloat16 <= self.seed_noise,
        }
        return [name for name, kept in bars.items() if not kept]


def losses(runs: Runs, **variant: Any) -> NDArray[np.float64]:
    """Of every step; one NaN where the variant was not run."""
    found = runs.get(Variant(**variant))
    return np.array([np.nan] if found is None else found["losses"])


def difference(runs: Runs, task: str, dtype: str, strategy: str, **more: Any) -> Any:
    """|loss - static's| of every step."""
    static = losses(runs, task=task, dtype=dtype, strategy="static")
    return np.abs(losses(runs, task=task, dtype=dtype, strategy=strategy, **more) - static)


def summarise(runs: Runs, task: str) -> Found:
    """All differences of a task."""
    worst = {
        dtype: float(np.max([difference(runs, task, dtype, s).max() for s in OTHERS]))
        for dtype in DTYPES
    }
    curves = [
        losses(runs, task=task, dtype="bfloat16", strategy="static", seed=s) for s in range(3)
    ]
    whole = len({len(c) for c in curves}) == 1
    noise = float(np.median(np.std(curves, axis=0, ddof=1))) if whole else float("nan")
    back = float(difference(runs, task, "float32", "static", reverse=True).max())
    return Found(**worst, reversed=back, seed_noise=noise)


def plans_of(runs: Runs, task: str, strategy: str) -> list[dict[str, Any]]:
    """They are the same for every number type and seed: lengths alone decide."""
    of_type = (Variant(task=task, dtype=d, strategy=strategy) for d in DTYPES)
    return next((runs[v]["plans"] for v in of_type if v in runs), [])


def plan_row(runs: Runs, task: str, strategy: str) -> list[str]:
    """What a strategy's plans were."""
    plans, static = plans_of(runs, task, strategy), plans_of(runs, task, "static")
    modes: Counter[str] = Counter()
    for p in plans:
        modes.update(p["modes"])
    other = sum(a["digest"] != b["digest"] for a, b in zip(plans, static, strict=False))
    listed = ", ".join(f"{m} {n}" for m, n in sorted(modes.items()))
    recomputed = str(sum(p["recomputed"] for p in plans))
    return [task, f"`{strategy}`", listed, recomputed, f"{other} of {len(plans)}"]


def shown(value: float, form: str = ".1e") -> str:
    return "not run" if np.isnan(value) else format(value, form)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in lines)


def print_tables(runs: Runs, tasks: Sequence[str]) -> list[str]:
    """The tables on stdout; names of missed bars."""
    rows, missed = [], []
    for task in tasks:
        f = summarise(runs, task)
        values = (f.float64, f.float32, f.reversed, f.bfloat16, f.seed_noise)
        cells = [shown(x) for x in values]
        cells.insert(3, shown(f.float32 / f.reversed, ".1f"))
        rows.append([task, *cells])
        missed += [f"{task}: {name}" for name in f.missed]
    head = ["task", "float64", "float32", "static, samples reversed, float32", "ratio",
            "bfloat16", "seed noise, bfloat16"]  # fmt: skip
    print("Largest difference of a step's loss to `static`:\n\n" + table(head, rows) + "\n")
    rows = []
    for task in tasks:
        rows += [plan_row(runs, task, s) for s in STRATEGIES]
    head = ["task", "strategy", "placements (scheme:degree)", "recomputing", "steps unlike static"]
    print("What the plans were:\n\n" + table(head, rows) + "\n")
    rows = []
    for task in tasks:
        exact = losses(runs, task=task, dtype="float32", strategy="static")
        row = [task, f"{exact[:1].mean():.4f}", f"{exact[-LAST:].mean():.4f}"]
        for s in STRATEGIES:
            variant = Variant(task=task, dtype="float32", strategy=s, schedule_weights=True)
            row.append("not run")
            if variant in runs:
                off = losses(runs, **asdict(variant)) - exact
                row[-1] = f"{off[-LAST:].mean():+.4f} ({np.abs(off).max():.3f})"
        rows.append(row)
    head = ["task", "first loss", f"mean of the last {LAST}", *(f"`{s}`" for s in STRATEGIES)]
    text = (
        f"Loss weights of the original, against the exact run: mean of the last {LAST} (largest):"
    )
    print(text + "\n\n" + table(head, rows) + "\n")
    return missed


def axes(rows: int, tasks: Sequence[str], runs: Runs) -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size = (4.2 * len(tasks), 2.9 * rows)
    figure, grid = plt.subplots(rows, len(tasks), figsize=size, squeeze=False, sharex=True)
    for ax, task in zip(grid[0], tasks, strict=True):
        ax.set_title(next(x["what"] for v, x in runs.items() if v.task == task), size=10)
        ax.set_ylabel("loss")
    for ax in grid[-1]:
        ax.set_xlabel("step")
    return figure, grid


def draw_curves(runs: Runs, tasks: Sequence[str], path: Path) -> None:
    """Loss above; below, the largest difference to `static` up to each step."""
    figure, grid = axes(2, tasks, runs)
    for task, (top, bottom) in zip(tasks, grid.T, strict=True):
        for s, style, width in zip(STRATEGIES, ("-", "--", ":"), (3.0, 1.8, 1.4), strict=True):
            values = losses(runs, task=task, dtype="float64", strategy=s)
            colour = "#BBBBBB" if s == "static" else COLOURS[s]
            top.plot(values, style, color=colour, lw=width, label=f"{s}, float64")
        for s in OTHERS:
            for dtype, style in (("float64", ":"), ("float32", "-"), ("bfloat16", "--")):
                off = np.maximum.accumulate(difference(runs, task, dtype, s))
                bottom.semilogy(off.clip(1e-17), style, color=COLOURS[s], lw=0.9,
                                label=f"{s}, {dtype}")  # fmt: skip
        off = difference(runs, task, "float32", "static", reverse=True)
        off = np.maximum.accumulate(off)
        bottom.semilogy(off.clip(1e-17), color=COLOURS["reversed"], lw=0.9,
                        label="static reversed, float32")  # fmt: skip
        bottom.axhline(1e-9, color="black", lw=0.6, ls="--")
        bottom.set_ylabel("largest |loss - static's| so far")
        bottom.set_ylim(1e-17, 1)
    grid[0, -1].legend(fontsize=7)
    grid[1, -1].legend(fontsize=6, ncols=2, loc="upper left")
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def draw_weights(runs: Runs, tasks: Sequence[str], path: Path) -> None:
    """What schedule-dependent loss weights would do to the curve."""
    shown = {v.task for v in runs if v.schedule_weights}
    tasks = [t for t in tasks if t in shown]
    figure, grid = axes(2, tasks, runs)
    for task, (top, bottom) in zip(tasks, grid.T, strict=True):
        exact = losses(runs, task=task, dtype="float32", strategy="static")
        top.plot(exact, color="#BBBBBB", lw=3, label="any strategy, weights as here")
        for s in STRATEGIES:
            found = losses(runs, task=task, dtype="float32", strategy=s, schedule_weights=True)
            top.plot(found, color=COLOURS[s], lw=0.9, label=f"{s}, the original's weights")
            bottom.plot(found - exact, color=COLOURS[s], lw=0.9)
        bottom.axhline(0, color="#BBBBBB", lw=3)
        bottom.set_ylabel("difference to exact")
    grid[0, -1].legend(fontsize=7)
    figure.suptitle(
        "Not what this project does:\nthe original's loss weights, which depend on the schedule\n"
        "(--schedule-weights of this benchmark only)",
        size=9,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/convergence"))
    parser.add_argument("--figures", type=Path, help="write convergence*.png here")
    args = parser.parse_args()
    runs = read_runs(args.runs)
    tasks = list(dict.fromkeys(v.task for v in runs))
    missed = print_tables(runs, tasks)
    if args.figures:
        draw_curves(runs, tasks, args.figures / "convergence.png")
        if any(v.schedule_weights for v in runs):
            draw_weights(runs, tasks, args.figures / "convergence_schedule_weights.png")
    print("missed: " + ("; ".join(missed) or "none"))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
