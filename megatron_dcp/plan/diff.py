"""Differences between two plans, field by field, smallest first: what a person or a log needs."""

from __future__ import annotations

from typing import Any

from megatron_dcp.plan.canonical import to_object
from megatron_dcp.plan.types import StepPlan


def diff(a: StepPlan, b: StepPlan, *, limit: int = 20) -> list[str]:
    """Lines `path: left != right`; empty when the canonical bytes are equal."""
    lines: list[str] = []
    _walk("", to_object(a, canonical=True), to_object(b, canonical=True), lines, limit)
    return lines


def first_difference(a: StepPlan, b: StepPlan) -> str | None:
    """The first differing field, or None."""
    lines = diff(a, b, limit=1)
    return lines[0] if lines else None


def first_object_difference(a: Any, b: Any) -> str | None:
    """The first differing field of two plan objects (plain JSON types), or None."""
    lines: list[str] = []
    _walk("", a, b, lines, 1)
    return lines[0] if lines else None


def _walk(path: str, a: Any, b: Any, lines: list[str], limit: int) -> None:
    if len(lines) >= limit or a == b:
        return
    if isinstance(a, dict) and isinstance(b, dict):
        for key in a:
            _walk(f"{path}.{key}" if path else key, a[key], b[key], lines, limit)
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            _walk(f"{path}[{i}]", x, y, lines, limit)
    elif isinstance(a, list) and isinstance(b, list):
        lines.append(f"{path}: {len(a)} entries != {len(b)} entries")
    else:
        lines.append(f"{path}: {a!r} != {b!r}")
