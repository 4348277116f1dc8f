"""Ranks that disagree stop before any collective of the step, with the difference named."""

from __future__ import annotations

import re

import pytest

from megatron_dcp.testing.pool import WorkerPool

CASE = "megatron_dcp.testing.cases.faults:disagreement"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("lengths", r"step 0: ranks hold different plans.*rank 1: lengths\[\d\]: 3[01] != 3[01]"),
        ("plan", r"rank 1: placements\[0\]\.time_us: \d+ != \d+"),
    ],
)
def test_a_divergent_rank_and_its_first_field_are_named_on_every_rank(
    pool: WorkerPool, fault: str, message: str
) -> None:
    results = pool.run(4, CASE, fault=fault)
    for r in results:
        assert r["type"] == "AgreementError"
        assert re.search(message, r["error"]), r["error"]
        assert r["sent"] == ["agree"], "nothing of the step has been sent"
        assert r["done"] == 0
    assert len({r["error"] for r in results}) == 1


def test_another_order_of_equal_lengths_is_noticed(pool: WorkerPool) -> None:
    for r in pool.run(2, CASE, fault="order"):
        assert r["type"] == "AgreementError"
        assert "drew other samples" in r["error"]


def test_an_unreadable_sample_stops_all_ranks_and_is_named(pool: WorkerPool) -> None:
    results = pool.run(4, CASE, fault="unreadable")
    assert {r["done"] for r in results} <= {0, 1}
    assert len({r["done"] for r in results}) == 1
    own = [r for r in results if r["type"] == "SampleError"]
    assert own, "the ranks that read it raise their own error"
    for r in results:
        assert "sample 2 cannot be read: OSError: disk error 5" in r["error"]
        assert r["type"] in ("SampleError", "AgreementError")


def test_items_that_are_drawn_at_every_reading_are_refused(pool: WorkerPool) -> None:
    """A sample of several ranks would be put together of several draws."""
    results = pool.run(4, CASE, fault="drawn")
    for r in results:
        assert "read twice and its 'input_ids' differs" in r["error"]
        assert "a function of its index" in r["error"]
        assert r["done"] == 0


def test_a_planner_that_fails_on_one_rank_stops_all(pool: WorkerPool) -> None:
    results = pool.run(2, CASE, fault="planner")
    assert [r["type"] for r in results] == ["AgreementError", "RuntimeError"]
    assert "rank 1: RuntimeError: planner crashed" in results[0]["error"]


def test_a_plan_for_another_batch_is_refused(pool: WorkerPool) -> None:
    for r in pool.run(2, CASE, fault="other workload"):
        assert r["type"] == "PlanError"
        assert "other lengths or shapes than the batch" in r["error"]
