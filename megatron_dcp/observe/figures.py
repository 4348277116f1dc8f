"""Plotly figures from plain data; pages put them together (`observe.html`). No file is written.

Every figure has a title that says what is shown, axes with units, and a legend where more than one
thing is drawn. Colours of degrees and of kinds of time are the same on all figures of a page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import plotly.graph_objects as go

from megatron_dcp.observe.timeline import degree_colours

PALETTE = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#999933", "#882255",
           "#BBBBBB", "#117733")  # fmt: skip
SHARE_COLOURS = {
    "compute": "#4477AA", "recompute": "#66CCEE", "communication in node": "#EE6677",
    "communication across nodes": "#AA3377", "gathers": "#CC6677", "reduction": "#882255",
    "overhead": "#CCBB44", "idle": "#DDDDDD",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar of a Gantt lane. lane: row label; name: legend entry; text: what hovering shows."""

    lane: str
    start_us: float
    end_us: float
    name: str
    colour: str
    text: str = ""
    thin: bool = False


def _layout(figure: Any, title: str, x: str, y: str, *, height: int = 420) -> Any:
    figure.update_layout(
        title={"text": title, "x": 0.01, "xanchor": "left", "font": {"size": 16}},
        xaxis_title=x,
        yaxis_title=y,
        height=height,
        template="plotly_white",
        margin={"l": 80, "r": 20, "t": 60, "b": 60},
        legend={"orientation": "h", "yanchor": "top", "y": -0.18, "x": 0},
        font={"family": "system-ui, sans-serif", "size": 13},
    )
    return figure


def step_times(rows: Mapping[str, tuple[float, float]], title: str) -> Any:
    """Bars with spread. rows: strategy -> (mean, standard deviation) of the step in ms."""
    names = list(rows)
    figure = go.Figure(
        go.Bar(
            x=names,
            y=[rows[n][0] for n in names],
            error_y={"type": "data", "array": [rows[n][1] for n in names]},
            marker_color=PALETTE[0],
            text=[f"{rows[n][0]:,.1f}" for n in names],
            textposition="inside",
            insidetextanchor="start",
        )
    )
    return _layout(figure, title, "strategy", "step time (ms), mean and std")


def shares(rows: Mapping[str, Mapping[str, float]], title: str) -> Any:
    """Stacked bars. rows: strategy -> kind of time -> share of rank-time."""
    names = list(rows)
    figure = go.Figure()
    for kind, colour in SHARE_COLOURS.items():
        values = [100 * rows[n].get(kind, 0.0) for n in names]
        if any(v > 0.005 for v in values):
            figure.add_bar(x=names, y=values, name=kind, marker_color=colour)
    figure.update_layout(barmode="stack")
    return _layout(figure, title, "strategy", "share of rank-time (%)", height=460)


def _log_edges(lengths: Sequence[int], per_octave: int = 2) -> list[float]:
    low = math.floor(math.log2(max(1, min(lengths))) * per_octave)
    high = math.floor(math.log2(max(lengths)) * per_octave) + 1
    return [2 ** (k / per_octave) for k in range(low, high + 1)]


def _bin_names(edges: Sequence[float]) -> list[str]:
    def short(x: float) -> str:
        return f"{x / 1024:.3g}K" if x >= 1024 else f"{x:.0f}"

    return [f"{short(a)}-{short(b)}" for a, b in pairwise(edges)]


def length_histogram(lengths: Sequence[int], title: str) -> Any:
    """Samples and tokens per length class (half octaves)."""
    edges = _log_edges(lengths)
    values = np.asarray(lengths, dtype=np.float64)
    samples, _ = np.histogram(values, edges)
    tokens, _ = np.histogram(values, edges, weights=values)
    names = _bin_names(edges)
    figure = go.Figure()
    figure.add_bar(x=names, y=100 * samples / max(1, samples.sum()), name="samples",
                   marker_color=PALETTE[0])  # fmt: skip
    figure.add_bar(x=names, y=100 * tokens / max(1, tokens.sum()), name="tokens",
                   marker_color=PALETTE[1])  # fmt: skip
    figure.update_xaxes(tickangle=-45)
    _layout(figure, title, "sample length (tokens)", "share (%)", height=460)
    return figure.update_layout(legend={"orientation": "h", "yanchor": "bottom", "y": 1.0, "x": 0})


def degrees_by_length(pairs: Sequence[tuple[int, int]], title: str) -> Any:
    """pairs: (length, degree) of each sample. Share of the tokens of a class on each degree."""
    edges = _log_edges([n for n, _ in pairs])
    names = _bin_names(edges)
    lengths = np.asarray([n for n, _ in pairs], dtype=np.float64)
    degrees = np.asarray([d for _, d in pairs])
    total, _ = np.histogram(lengths, edges, weights=lengths)
    figure = go.Figure()
    for degree, colour in degree_colours(degrees.tolist()).items():
        chosen = lengths[degrees == degree]
        part, _ = np.histogram(chosen, edges, weights=chosen)
        share = np.divide(100 * part, total, out=np.zeros_like(total), where=total > 0)
        figure.add_bar(x=names, y=share, name=f"degree {degree}", marker_color=colour)
    figure.update_layout(barmode="stack", showlegend=True)
    figure.update_xaxes(tickangle=-45)
    _layout(figure, title, "sample length (tokens)", "share of the class's tokens (%)", height=480)
    return figure.update_layout(legend={"orientation": "h", "yanchor": "bottom", "y": 1.0, "x": 0})


def gantt(bars: Sequence[Bar], title: str, lanes: Sequence[str] | None = None) -> Any:
    """One row per lane; hover shows a bar's text. lanes: rows from the top, empty ones included
    (default: those of the bars, in order of first appearance)."""
    lanes = list(dict.fromkeys([*(lanes or ()), *(b.lane for b in bars)]))
    figure = go.Figure()
    by_name: dict[tuple[str, bool], list[Bar]] = {}
    for b in bars:
        by_name.setdefault((b.name, b.thin), []).append(b)
    for (name, thin), group in by_name.items():
        figure.add_bar(
            orientation="h",
            y=[b.lane for b in group],
            base=[b.start_us / 1e3 for b in group],
            x=[(b.end_us - b.start_us) / 1e3 for b in group],
            name=name,
            marker={"color": group[0].colour, "line": {"color": "white", "width": 0.6}},
            width=0.35 if thin else 0.8,
            hovertext=[b.text for b in group],
            hovertemplate="%{hovertext}<br>from %{base:.2f} ms, %{x:.2f} ms<extra>%{y}</extra>",
        )
    figure.update_layout(barmode="overlay", showlegend=True)
    figure.update_xaxes(range=[0, 1.02 * max((b.end_us for b in bars), default=1.0) / 1e3])
    height = min(1400, 190 + 18 * len(lanes))
    _layout(figure, title, "time from the start of the step (ms)", "", height=height)
    figure.update_yaxes(
        categoryorder="array",
        categoryarray=lanes[::-1],
        type="category",
        range=[-0.5, len(lanes) - 0.5],
    )
    return figure.update_layout(legend={"y": -62 / (height - 120)})


def lines(
    series: Mapping[str, Sequence[tuple[float, float]]],
    title: str,
    x: str,
    y: str,
    *,
    log_x: bool = False,
    from_zero: bool = True,
) -> Any:
    """One line per name through its (x, y) points."""
    figure = go.Figure()
    for k, (name, points) in enumerate(series.items()):
        figure.add_scatter(
            x=[p[0] for p in points],
            y=[p[1] for p in points],
            name=name,
            mode="lines+markers",
            line={"color": PALETTE[k % len(PALETTE)]},
        )
    _layout(figure, title, x, y)
    if from_zero:
        figure.update_yaxes(rangemode="tozero")
    figure.update_layout(showlegend=True)
    longest = max((len(points) for points in series.values()), default=0)
    if not log_x and longest <= 20:
        figure.update_xaxes(dtick=1)
    if log_x:
        values = sorted({p[0] for points in series.values() for p in points})
        figure.update_xaxes(type="log", tickvals=values, ticktext=[f"{v:,.0f}" for v in values])
    return figure


def heatmap(values: Sequence[Sequence[float]], title: str, x: str, y: str, unit: str) -> Any:
    """values[row][column], rows from the top."""
    figure = go.Figure(
        go.Heatmap(z=values, colorscale="Viridis", colorbar={"title": {"text": unit}})
    )
    _layout(figure, title, x, y, height=max(300, min(900, 160 + 18 * len(values))))
    figure.update_yaxes(autorange="reversed")
    if len(values) <= 32:
        figure.update_yaxes(dtick=1)
    return figure


def _log_ticks(values: Sequence[float]) -> list[float]:
    """1, 2 and 5 times powers of ten around positive values."""
    if not values:
        return []
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    steps = (1, 2, 5) if high - low <= 3 else (1,)
    return [m * 10.0**k for k in range(low, high + 1) for m in steps]


def prediction_scatter(
    series: Mapping[str, Sequence[tuple[float, float]]], title: str, unit: str = "ms"
) -> Any:
    """series: name -> (predicted, measured). The diagonal is a perfect prediction."""
    figure = go.Figure()
    values = [v for points in series.values() for p in points for v in p]
    if values:
        low, high = min(values) * 0.9, max(values) * 1.1
        figure.add_scatter(x=[low, high], y=[low, high], mode="lines", name="perfect prediction",
                           line={"color": "#777777", "dash": "dash"})  # fmt: skip
    for k, (name, points) in enumerate(series.items()):
        figure.add_scatter(
            x=[p[0] for p in points],
            y=[p[1] for p in points],
            mode="markers",
            name=name,
            marker={"color": PALETTE[k % len(PALETTE)], "size": 7, "opacity": 0.7},
        )
    ticks = _log_ticks(values)
    for update in (figure.update_xaxes, figure.update_yaxes):
        update(type="log", tickvals=ticks, ticktext=[f"{v:g}" for v in ticks])
    return _layout(figure, title, f"predicted ({unit})", f"measured ({unit})", height=480)
