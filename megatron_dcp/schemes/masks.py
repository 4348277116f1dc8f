"""Masks as rectangles of one sample, and as segment lists between local shards.

A rectangle holds queries q0..q1-1 and keys k0..k1-1 of a sample (positions); inside it the query at
position p sees keys p - left .. p + right, -1 being no limit. Every mask here is a list of
rectangles with disjoint query ranges: causal, full, sliding window, documents (block-diagonal
inside a sample) and prefix-LM. Cut by the spans that two ranks hold, they become the segment list
of `megatron_dcp.ops`; parts that nobody sees are left out, which is what lets a ring skip steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_dcp.dist import PlacementContext
from megatron_dcp.errors import ConfigError
from megatron_dcp.ops.segments import band_segment
from megatron_dcp.plan.shards import Span


class Rect(NamedTuple):
    q0: int
    q1: int
    k0: int
    k1: int
    left: int
    right: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """causal, and how far a query sees to the left and right (-1: no limit)."""

    causal: bool = True
    window_size: tuple[int, int] = (-1, -1)

    def __post_init__(self) -> None:
        object.__setattr__(self, "window_size", tuple(self.window_size))  # a list has no hash
        if len(self.window_size) != 2 or min(self.window_size) < -1:
            raise ConfigError(
                f"window_size {self.window_size!r}: pass (left, right), each -1 (no limit) or >= 0"
            )

    @property
    def left(self) -> int:
        return self.window_size[0]

    @property
    def right(self) -> int:
        return 0 if self.causal else self.window_size[1]


def sample_rects(
    mask: Mask, length: int, documents: Sequence[int] | None, prefix: int | None
) -> list[Rect]:
    """The rectangles of one sample; document lengths must add up to its length."""
    if documents is None:
        ranges = [(0, length)]
    else:
        ranges, at = [], 0
        for n in documents:
            if n < 0:
                raise ConfigError(f"document lengths {list(documents)} must not be negative")
            ranges.append((at, at + n))
            at += n
        if at != length:
            raise ConfigError(
                f"documents of a sample add up to {at} tokens, the sample has {length}"
            )
    rects: list[Rect] = []
    for a, b in ranges:
        if a == b:
            continue
        p = min(max(prefix or 0, a), b) if mask.causal else a
        if p > a:  # these see each other both ways
            rects.append(Rect(a, p, a, p, -1, -1))
        if b > p:
            rects.append(Rect(p, b, a, b, mask.left, mask.right))
    return rects


def _clip(rect: Rect, q: Span, k: Span) -> tuple[int, int, int, int] | None:
    """The part of a rectangle in two spans that is not all hidden: (q0, q1, k0, k1)."""
    q0, q1 = max(rect.q0, q.start), min(rect.q1, q.stop)
    k0, k1 = max(rect.k0, k.start), min(rect.k1, k.stop)
    if rect.right >= 0:
        k1 = min(k1, q1 + rect.right)
        q0 = max(q0, k0 - rect.right)
    if rect.left >= 0:
        k0 = max(k0, q0 - rect.left)
        q1 = min(q1, k1 + rect.left)
    return (q0, q1, k0, k1) if q0 < q1 and k0 < k1 else None


def _offsets(spans: Sequence[Span]) -> list[int]:
    out, at = [], 0
    for s in spans:
        out.append(at)
        at += s.stop - s.start
    return out


def segments_between(
    rects: Sequence[Sequence[Rect]], q_spans: Sequence[Span], k_spans: Sequence[Span]
) -> list[tuple[int, ...]]:
    """Segment rows between two shards: local q rows of `q_spans`, local k rows of `k_spans`."""
    by_sample: dict[int, list[tuple[int, Span]]] = {}
    for offset, span in zip(_offsets(k_spans), k_spans, strict=True):
        by_sample.setdefault(span.sample, []).append((offset, span))
    rows: list[tuple[int, ...]] = []
    for q_offset, q in zip(_offsets(q_spans), q_spans, strict=True):
        for k_offset, k in by_sample.get(q.sample, ()):
            for rect in rects[q.sample]:
                part = _clip(rect, q, k)
                if part is None:
                    continue
                q0, q1, k0, k1 = part
                rows.append(
                    band_segment(
                        q_offset + q0 - q.start,
                        q1 - q0,
                        k_offset + k0 - k.start,
                        k1 - k0,
                        q_position=q0,
                        k_position=k0,
                        left=rect.left,
                        right=rect.right,
                    )
                )
    return rows


def context_rects(ctx: PlacementContext, mask: Mask) -> list[list[Rect]]:
    """Rectangles of every sample of a placement, kept in the context."""
    key = ("rects", mask)
    if key not in ctx.cache:
        ctx.cache[key] = [
            sample_rects(
                mask,
                n,
                None if ctx.documents is None else ctx.documents[j],
                None if ctx.prefix is None else ctx.prefix[j],
            )
            for j, n in enumerate(ctx.lengths)
        ]
    rects: list[list[Rect]] = ctx.cache[key]
    return rects


def is_plain(ctx: PlacementContext) -> bool:
    """Whether cu_seqlens, causal and window say everything."""
    return ctx.documents is None and ctx.prefix is None
