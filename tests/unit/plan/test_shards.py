"""The sharding rule: every token on exactly one rank, no padding, balanced causal work."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dcp.errors import PlanError
from megatron_dcp.plan.shards import Span, chunk_bounds, cut_spans, member_spans, shard_map

lengths_of = st.lists(st.integers(0, 300), min_size=1, max_size=6)


@given(lengths=lengths_of, outer=st.integers(1, 12), inner=st.integers(1, 4))
def test_every_token_is_on_exactly_one_rank(lengths: list[int], outer: int, inner: int) -> None:
    shards = shard_map(lengths, outer * inner, inner)
    held = sorted((s.sample, t) for r in shards.ranks for s in r for t in range(s.start, s.stop))
    assert held == [(j, t) for j, n in enumerate(lengths) for t in range(n)]
    assert shards.tokens == tuple(sum(s.stop - s.start for s in r) for r in shards.ranks)
    assert shards.outer == outer


@given(length=st.integers(200, 5000), outer=st.integers(1, 8))
def test_causal_work_is_balanced(length: int, outer: int) -> None:
    work = []
    for member in range(outer):
        spans = member_spans([length], outer, member)
        work.append(sum(t + 1 for s in spans for t in range(s.start, s.stop)))
    # Boundaries are rounded by less than a row each; no row sees more than `length` keys.
    assert max(work) - min(work) <= 2 * length


def test_zigzag_of_one_sample() -> None:
    assert chunk_bounds(10, 4) == [0, 2, 5, 7, 10]
    assert member_spans([10], 2, 0) == [Span(0, 0, 2), Span(0, 7, 10)]
    assert member_spans([10], 2, 1) == [Span(0, 2, 7)]  # the middle chunks touch


def test_samples_shorter_than_the_degree_leave_ranks_empty() -> None:
    shards = shard_map([1], 4, 1)
    assert sum(shards.tokens) == 1
    assert shards.tokens.count(0) == 3


@given(lengths=lengths_of, data=st.data())
def test_inner_ranks_hold_an_even_cut(lengths: list[int], data: st.DataObject) -> None:
    inner = data.draw(st.integers(1, 8))
    tokens = shard_map(lengths, inner, inner).tokens
    assert max(tokens) - min(tokens) <= 1


def test_cut_spans_counts_in_the_order_of_the_list() -> None:
    spans = [Span(0, 5, 8), Span(2, 0, 4)]
    assert cut_spans(spans, 2, 5) == [Span(0, 7, 8), Span(2, 0, 2)]
    assert cut_spans(spans, 7, 9) == []


def test_inner_must_divide_the_degree() -> None:
    with pytest.raises(PlanError, match="inner degree 3 must divide degree 4"):
        shard_map([5], 4, 3)
