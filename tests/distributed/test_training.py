"""Several optimizer steps: losses and parameters do not depend on ranks, strategy or wrapper."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_dcp.observe.events import KINDS
from megatron_dcp.testing.pool import WorkerPool

CASE = "megatron_dcp.testing.cases.training:training_case"


@pytest.fixture(scope="module")
def alone(pool: WorkerPool) -> dict[str, Any]:
    """Four steps on one rank."""
    result: dict[str, Any] = pool.run(1, CASE)[0]
    return result


@pytest.mark.parametrize("strategy", [None, "packed:1", "static", "dcp"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_training_equals_one_rank(
    pool: WorkerPool, alone: dict[str, Any], ranks: int, strategy: str | None
) -> None:
    """AdamW, a scheduler, clipping: the same losses, norms and parameters to the last digits."""
    results = pool.run(ranks, CASE, strategy=strategy)
    for r in results:
        assert r["losses"] == pytest.approx(alone["losses"], rel=1e-12)
        assert r["norms"] == pytest.approx(alone["norms"], rel=1e-12)
        assert r["parameters"] == alone["parameters"]
        assert r["lr"] == alone["lr"]
        assert r["losses"] == results[0]["losses"], "all ranks print the same number"
        assert r["digests"] == results[0]["digests"]


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_wrapped_training_equals_one_rank(
    pool: WorkerPool, alone: dict[str, Any], wrapper: str
) -> None:
    for r in pool.run(2, CASE, wrapper=wrapper):
        assert r["losses"] == pytest.approx(alone["losses"], rel=1e-12)
        assert r["parameters"] == alone["parameters"]


@pytest.mark.parametrize(("ranks", "wrapper"), [(1, "bare"), (2, "bare"), (2, "ddp"), (2, "fsdp2")])
def test_gradients_that_no_optimizer_steps_do_not_pile_up(
    pool: WorkerPool, ranks: int, wrapper: str
) -> None:
    """As in a loop that clips all parameters and clears all gradients, on any number of ranks."""
    case = "megatron_dcp.testing.cases.training:unstepped_case"
    for r in pool.run(ranks, case, wrapper=wrapper):
        assert r["norms"] == pytest.approx(r["expected"], rel=1e-12)
        assert min(r["norms"]) > 0.5, "every step is clipped"
        assert r["error"] <= 1e-13
        assert r["left"] == []


def test_planning_in_line_and_in_the_background_are_equal(
    pool: WorkerPool, alone: dict[str, Any]
) -> None:
    for r in pool.run(2, CASE, plan_ahead=0) + pool.run(2, CASE, plan_ahead=3):
        assert r["losses"] == pytest.approx(alone["losses"], rel=1e-12)


def test_events_tell_what_a_rank_did(pool: WorkerPool) -> None:
    results = pool.run(2, CASE, measure=True, strategy="packed:2", steps=3)
    for rank, r in enumerate(results):
        events = r["events"]
        assert {e["kind"] for e in events} == set(KINDS)
        assert {e["rank"] for e in events} == {rank}
        assert {e["step"] for e in events} == {0, 1, 2}
        steps = {e["step"]: e for e in events if e["kind"] == "step"}
        for e in events:
            assert e["start_us"] <= e["end_us"]
            if e["kind"] in ("placement", "comm", "wait", "reduce", "optimizer"):
                whole = steps[e["step"]]
                assert whole["start_us"] <= e["start_us"]
                assert e["end_us"] <= whole["end_us"]
        placements = [e for e in events if e["kind"] == "placement" and e["step"] == 0]
        assert sum(e["tokens"] for e in placements) == steps[0]["tokens"]
        assert {e["scheme"] for e in placements} <= {"ulysses", "ring", "allgather"}


def test_a_paced_link_bounds_what_a_rank_sends(pool: WorkerPool, alone: dict[str, Any]) -> None:
    """The scale model slows communication and changes nothing else."""
    rate = 2e6
    results = pool.run(2, CASE, measure=True, strategy="packed:2", steps=2, bytes_per_s=rate)
    for r in results:
        assert r["losses"] == pytest.approx(alone["losses"][:2], rel=1e-12)
        reduce_us = sum(e["end_us"] - e["start_us"] for e in r["events"] if e["kind"] == "reduce")
        gradient_bytes = 2 * 8 * r["numel"]  # two steps, float64, 2 (n-1)/n of it = all of it
        assert reduce_us >= gradient_bytes / rate * 1e6


def test_communicators_are_few(pool: WorkerPool) -> None:
    """The data group and one all-to-all group for each block that plans used; none of size 1."""
    first = pool.run(2, CASE, strategy="packed:1")[0]["communicators"]
    again = pool.run(2, CASE, seed=1, steps=6)[0]["communicators"]
    assert first <= again <= 2
