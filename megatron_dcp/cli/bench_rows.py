"""Rows of `mdcp.bench/1`, shared by the benchmarks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of `mdcp.bench/1`. ok: None where no bar applies."""

    case: str
    metric: str
    unit: str
    value: float
    baseline: str = ""
    ratio: float | None = None
    bar: float | None = None
    ok: bool | None = None


def text_row(row: Row) -> str:
    against = f" vs {row.baseline} x{row.ratio}" if row.baseline else ""
    bar = "" if row.bar is None else f"   bar {row.bar:g}: {'ok' if row.ok else 'FALLS SHORT'}"
    return f"{row.case:<30} {row.metric:<13} {row.value:>12.3f} {row.unit:<3}{against}{bar}"
