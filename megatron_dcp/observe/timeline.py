"""PNG timeline of one step: planned lanes above measured lanes, one lane per rank.

Colour says the degree, hatching the waiting; both panels share one time axis in milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_dcp.errors import ConfigError
from megatron_dcp.observe.events import Event, step_window
from megatron_dcp.plan import StepPlan, timeline

# Degrees 1, 2, 4 .. 4096; then those that are no power of two.
_PALETTE = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#999933", "#882255",
            "#117733", "#DDCC77", "#332288", "#CC6677", "#AA4499", "#44AA99")  # fmt: skip
_WAIT, _REDUCE, _COMM = "#DDDDDD", "#777777", "#000000"


def degree_colours(degrees: Sequence[int]) -> dict[int, str]:
    """One colour per degree, the same in every figure; powers of two never share one."""
    shift = {d: 7 if d & (d - 1) else 0 for d in sorted(set(degrees))}
    return {d: _PALETTE[(d.bit_length() - 1 + s) % len(_PALETTE)] for d, s in shift.items()}


def draw_step(plan: StepPlan, events: Sequence[Event], path: str | Path, title: str) -> Path:
    """Write the PNG. events: those of one step (may be empty: planned lanes alone are drawn)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    if not plan.placements:
        raise ConfigError("the plan has no placement: there is nothing to draw")
    colours = degree_colours([p.degree for p in plan.placements])
    ranks = plan.topology.data_ranks
    panels = 2 if events else 1
    height = min(2.2 + panels * (0.8 + 0.38 * ranks), 16.0)
    figure, axes = plt.subplots(
        panels, 1, sharex=True, figsize=(11, height), squeeze=False, layout="constrained"
    )
    _planned(axes[0][0], plan, colours)
    if events:
        _measured(axes[1][0], events, colours, ranks)
    axes[-1][0].set_xlabel("time from the start of the step (ms)")
    handles = [Patch(color=c, label=f"degree {d}") for d, c in colours.items()]
    if any(p.recompute for p in plan.placements):
        handles.append(Patch(facecolor="white", hatch="xx", edgecolor="#888888",
                             label="recomputes"))  # fmt: skip
    if events:
        handles += [
            Patch(facecolor=_COMM, label="communication"),
            Patch(facecolor=_WAIT, hatch="//", edgecolor="#999999", label="waiting"),
            Patch(facecolor=_REDUCE, label="gradient reduction"),
        ]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 7))
    figure.suptitle(title)
    target = Path(path)
    figure.savefig(target, dpi=110)
    plt.close(figure)
    return target


def _lanes(axis: Any, ranks: int, name: str) -> None:
    axis.set_title(name, loc="left", fontsize=10)
    axis.set_ylim(ranks - 0.5, -0.5)
    axis.set_ylabel("rank")
    step = max(1, ranks // 16)
    axis.set_yticks(range(0, ranks, step))
    axis.grid(axis="x", linewidth=0.3)
    axis.set_axisbelow(True)


def _bar(axis: Any, rank: int, start_us: float, end_us: float, height: float = 0.8,
         **style: Any) -> None:  # fmt: skip
    axis.broken_barh([(start_us / 1e3, (end_us - start_us) / 1e3)],
                     (rank - height / 2, height), **style)  # fmt: skip


def _planned(axis: Any, plan: StepPlan, colours: dict[int, str]) -> None:
    idle = plan.info.get("idle")
    text = f"planned: {plan.makespan_us / 1e3:.1f} ms"
    _lanes(
        axis, plan.topology.data_ranks, text + (f", idle {idle:.1%}" if idle is not None else "")
    )
    for x in timeline(plan):
        p = plan.placements[x.placement]
        _bar(axis, x.rank, x.start_us, x.end_us, facecolor=colours[p.degree], edgecolor="white",
             linewidth=0.6, hatch="xx" if p.recompute else None)  # fmt: skip


def _measured(axis: Any, events: Sequence[Event], colours: dict[int, str], ranks: int) -> None:
    start, end = step_window(events)
    _lanes(axis, ranks, f"measured: {(end - start) / 1e3:.1f} ms")
    for e in events:
        span = (e["start_us"] - start, e["end_us"] - start)
        if e["kind"] == "placement":
            _bar(axis, e["rank"], *span, facecolor=colours.get(e["degree"], "#BBBBBB"),
                 edgecolor="white", linewidth=0.6)  # fmt: skip
        elif e["kind"] == "wait":
            _bar(axis, e["rank"], *span, facecolor=_WAIT, hatch="//", edgecolor="#999999",
                 linewidth=0)  # fmt: skip
        elif e["kind"] == "reduce":
            _bar(axis, e["rank"], *span, facecolor=_REDUCE)
    for e in events:
        if e["kind"] == "comm":
            span = (e["start_us"] - start, e["end_us"] - start)
            _bar(axis, e["rank"], *span, height=0.28, facecolor=_COMM)
