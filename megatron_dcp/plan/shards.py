"""Who holds which tokens of a placement: the one sharding rule of every scheme. Integers only.

A block of `degree` ranks is `outer` groups of `inner` consecutive ranks (outer = degree / inner;
`inner` is the Ulysses part, so local, ring and allgather have inner 1 and ulysses has outer 1).

* Across the outer members each sample is cut into 2 * outer chunks at floor(i * L / (2 * outer));
  member o holds chunks o and 2 * outer - 1 - o (zigzag: equal work under a causal mask). No padding
  and no divisibility rule; chunks may be empty.
* A member's tokens, samples in order and chunks ascending, are cut evenly over its inner ranks at
  floor(i * T / inner).

Every token of the pack is held by exactly one rank. `block_rank` = o * inner + i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_dcp.errors import PlanError


class Span(NamedTuple):
    """Tokens start..stop-1 of one sample; `sample` counts inside the pack, from 0."""

    sample: int
    start: int
    stop: int


def chunk_bounds(length: int, chunks: int) -> list[int]:
    """The chunks + 1 boundaries floor(i * length / chunks)."""
    return [i * length // chunks for i in range(chunks + 1)]


def member_spans(lengths: Sequence[int], outer: int, member: int) -> list[Span]:
    """The spans of one outer member, in the order in which it holds them; no empty ones."""
    if outer == 1:
        return [Span(j, 0, n) for j, n in enumerate(lengths) if n]
    spans: list[Span] = []
    first, last = member, 2 * outer - 1 - member
    for j, n in enumerate(lengths):
        a, b = first * n // (2 * outer), (first + 1) * n // (2 * outer)
        c, d = last * n // (2 * outer), (last + 1) * n // (2 * outer)
        if b == c and a < b and c < d:  # the two middle chunks touch
            spans.append(Span(j, a, d))
            continue
        if a < b:
            spans.append(Span(j, a, b))
        if c < d:
            spans.append(Span(j, c, d))
    return spans


def span_tokens(spans: Sequence[Span]) -> int:
    """Number of tokens in some spans."""
    return sum(s.stop - s.start for s in spans)


def cut_spans(spans: Sequence[Span], begin: int, end: int) -> list[Span]:
    """Tokens begin..end-1 of a list of spans, counted in the order of the list."""
    out: list[Span] = []
    at = 0
    for s in spans:
        n = s.stop - s.start
        lo, hi = max(begin - at, 0), min(end - at, n)
        if lo < hi:
            out.append(Span(s.sample, s.start + lo, s.start + hi))
        at += n
        if at >= end:
            break
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardMap:
    """The shards of one placement. members[o]: spans of an outer member; ranks[b]: of a rank."""

    lengths: tuple[int, ...]
    degree: int
    inner: int
    members: tuple[tuple[Span, ...], ...]
    ranks: tuple[tuple[Span, ...], ...]
    tokens: tuple[int, ...]  # per block rank

    @property
    def outer(self) -> int:
        return self.degree // self.inner


def shard_map(lengths: Sequence[int], degree: int, inner: int) -> ShardMap:
    """Cut a pack of samples over a block; `inner` must divide `degree`."""
    if degree < 1 or inner < 1 or degree % inner:
        raise PlanError(
            f"shards: inner degree {inner} must divide degree {degree}, both at least 1"
        )
    outer = degree // inner
    members = tuple(tuple(member_spans(lengths, outer, o)) for o in range(outer))
    ranks: list[tuple[Span, ...]] = []
    for spans in members:
        if inner == 1:
            ranks.append(spans)
            continue
        cuts = chunk_bounds(span_tokens(spans), inner)
        ranks += [tuple(cut_spans(spans, cuts[i], cuts[i + 1])) for i in range(inner)]
    return ShardMap(
        lengths=tuple(lengths),
        degree=degree,
        inner=inner,
        members=members,
        ranks=tuple(ranks),
        tokens=tuple(span_tokens(s) for s in ranks),
    )
