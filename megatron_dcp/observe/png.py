"""Small PNG figures for documents (matplotlib, 110 dpi, below 300 KB)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_dcp.observe.figures import PALETTE


def _axes(title: str, size: tuple[float, float] = (8.0, 4.5)) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=size, layout="constrained")
    axis.set_title(title, loc="left", fontsize=11)
    axis.grid(linewidth=0.3)
    axis.set_axisbelow(True)
    return figure, axis


def _save(figure: Any, path: Path) -> Path:
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def bars(rows: Mapping[str, tuple[float, float]], path: Path, title: str, y: str) -> Path:
    """rows: name -> (mean, standard deviation)."""
    figure, axis = _axes(title, (max(6.0, 1.1 * len(rows) + 2), 4.5))
    names = list(rows)
    axis.bar(names, [rows[n][0] for n in names], yerr=[rows[n][1] for n in names],
             color=PALETTE[0], capsize=4, width=0.65)  # fmt: skip
    for k, n in enumerate(names):
        axis.text(k, rows[n][0] * 0.02, f"{rows[n][0]:,.3g}", ha="center", va="bottom",
                  color="white", fontsize=9)  # fmt: skip
    axis.set_ylabel(y)
    axis.tick_params(axis="x", rotation=30 if len(names) > 5 else 0)
    return _save(figure, path)


def curves(
    series: Mapping[str, Sequence[tuple[float, float]]], path: Path, title: str, x: str, y: str
) -> Path:
    """Lines over a logarithmic x axis whose ticks are the points."""
    figure, axis = _axes(title)
    for k, (name, points) in enumerate(series.items()):
        axis.plot([p[0] for p in points], [p[1] for p in points], marker="o", label=name,
                  color=PALETTE[k % len(PALETTE)])  # fmt: skip
    values = sorted({p[0] for points in series.values() for p in points})
    if values:
        axis.set_xscale("log")
        axis.set_xticks(values, [f"{v:,.1f}".removesuffix(".0") for v in values])
        axis.minorticks_off()
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=9, ncols=2)
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    return _save(figure, path)


def scatter(
    series: Mapping[str, Sequence[tuple[float, float]]], path: Path, title: str, unit: str = "ms"
) -> Path:
    """series: name -> (predicted, measured), both axes logarithmic, with the diagonal."""
    figure, axis = _axes(title, (6.0, 5.0))
    values = [v for points in series.values() for p in points for v in p if v > 0]
    if values:
        ends = [min(values) * 0.9, max(values) * 1.1]
        axis.plot(ends, ends, "--", color="#777777", label="perfect prediction")
    for k, (name, points) in enumerate(series.items()):
        axis.scatter([p[0] for p in points], [p[1] for p in points], s=18, alpha=0.7, label=name,
                     color=PALETTE[k % len(PALETTE)])  # fmt: skip
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel(f"predicted ({unit})")
    axis.set_ylabel(f"measured ({unit})")
    axis.legend(fontsize=9)
    return _save(figure, path)
