"""Masks as segment lists: what two shards see of each other is what the dense mask says."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dcp.errors import ConfigError
from megatron_dcp.plan.shards import Span, shard_map
from megatron_dcp.schemes.masks import Mask, sample_rects, segments_between
from megatron_dcp.testing.reference import visible


def positions(spans: tuple[Span, ...]) -> list[tuple[int, int]]:
    return [(s.sample, t) for s in spans for t in range(s.start, s.stop)]


@st.composite
def masks(draw: st.DrawFn, lengths: list[int]) -> dict[str, Any]:
    kind = draw(st.sampled_from(["causal", "full", "window", "two-sided", "documents", "prefix"]))
    if kind == "documents":
        cuts = [sorted(draw(st.lists(st.integers(0, n), max_size=3))) for n in lengths]
        bounds = [[0, *c, n] for c, n in zip(cuts, lengths, strict=True)]
        documents = [[b - a for a, b in pairwise(x)] for x in bounds]
        return {"documents": documents, "causal": draw(st.booleans())}
    if kind == "prefix":
        return {"prefix": [draw(st.integers(0, n)) for n in lengths], "causal": True}
    if kind == "window":
        return {"causal": True, "window_size": (draw(st.integers(0, 9)), 0)}
    if kind == "two-sided":
        window = (draw(st.integers(-1, 6)), draw(st.integers(-1, 6)))
        return {"causal": False, "window_size": window}
    return {"causal": kind == "causal"}


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_segments_are_the_dense_mask(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 24), min_size=1, max_size=3))
    kind = data.draw(masks(lengths))
    documents, prefix = kind.pop("documents", None), kind.pop("prefix", None)
    shards = shard_map(lengths, data.draw(st.integers(1, 5)), 1)
    rects = [
        sample_rects(
            Mask(**kind), n, documents[j] if documents else None, prefix[j] if prefix else None
        )
        for j, n in enumerate(lengths)
    ]
    dense = [
        visible(
            n,
            documents=documents[j] if documents else None,
            prefix=prefix[j] if prefix else 0,
            **kind,
        )
        for j, n in enumerate(lengths)
    ]
    q, k = data.draw(st.sampled_from(shards.members)), data.draw(st.sampled_from(shards.members))
    want = torch.tensor(
        [[a == b and bool(dense[a][p, r]) for b, r in positions(k)] for a, p in positions(q)]
    ).reshape(len(positions(q)), len(positions(k)))
    found = torch.zeros(want.shape, dtype=torch.int64)
    for q_start, q_len, k_start, k_len, diagonal, window in segments_between(rects, q, k):
        i, j = torch.arange(q_len)[:, None], torch.arange(k_len)[None, :]
        see = j <= i + diagonal
        if window >= 0:
            see &= j >= i + diagonal - window
        found[q_start : q_start + q_len, k_start : k_start + k_len] += see.long()
    assert torch.equal(found, want.long()), "every visible pair exactly once"


def test_parts_that_nobody_sees_are_left_out() -> None:
    rects = [sample_rects(Mask(window_size=(2, 0)), 100, None, None)]
    assert segments_between(rects, [Span(0, 0, 10)], [Span(0, 50, 60)]) == []
    assert segments_between(rects, [Span(0, 50, 60)], [Span(0, 0, 10)]) == []
    assert len(segments_between(rects, [Span(0, 50, 60)], [Span(0, 45, 50)])) == 1


def test_documents_must_add_up() -> None:
    with pytest.raises(ConfigError, match="add up to 9 tokens, the sample has 10"):
        sample_rects(Mask(), 10, [4, 5], None)


@pytest.mark.parametrize("window", [(-2, 0), (1, 2, 3)])
def test_a_wrong_window_is_refused(window: Any) -> None:
    with pytest.raises(ConfigError, match="window_size"):
        Mask(window_size=window)
