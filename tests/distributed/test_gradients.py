"""Gradients do not depend on the plan: float64, real gloo processes, random valid plans.

Measure: max|g - g_ref| / max(max|g_ref| of the tensor, 1e-6 * max|g_ref| of the model) <= 1e-10,
against one process that runs the samples one by one with dense attention.
"""

from __future__ import annotations

from typing import Any

import pytest

from megatron_dcp.testing.pool import WorkerPool

CASE = "megatron_dcp.testing.cases.gradients:gradient_case"
TOLERANCE = 1e-10

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "masked": {"masked": 0.5},
    "all-but-one-masked": {"masked": 0.97},
    "idle-rank": {"idle_rank": True},
    "sample-normalized": {"normalize": "sample", "masked": 0.3},
    "weighted": {"weighted": True, "masked": 0.2},
    "weighted-samples": {"weighted": True, "normalize": "sample"},
    "lockstep": {"lockstep": "all"},
    "few-samples": {"samples": 2},
    "one-kv-head": {"heads": 8, "kv_heads": 1},
}


def check(results: list[dict[str, Any]]) -> None:
    for rank, r in enumerate(results):
        assert r["error"] <= TOLERANCE, f"rank {rank}: {r['error']} in {r['where']}"
        assert r["loss_error"] <= 1e-12
        assert not r["extra"]
    assert len({r["loss"] for r in results}) == 1, "all ranks print the same loss"


# Eight processes on a small machine are slow: the options that differ most run there.
CASES = [
    (ranks, option)
    for ranks in (1, 2, 4, 8)
    for option in (OPTIONS if ranks < 8 else ("plain", "masked", "idle-rank", "one-kv-head"))
]


@pytest.mark.parametrize("wrapper", ["bare", "ddp"])
@pytest.mark.parametrize(("ranks", "option"), CASES)
def test_random_plans(pool: WorkerPool, ranks: int, option: str, wrapper: str) -> None:
    for seed in range(2):
        check(pool.run(ranks, CASE, seed=seed, wrapper=wrapper, **OPTIONS[option]))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_padding_to_a_shape_quantum_changes_no_gradient(pool: WorkerPool, ranks: int) -> None:
    """Padding of the samples is planned, dealt to ranks and computed; the reference has none."""
    for seed in range(2):
        results = pool.run(ranks, CASE, seed=seed, quantum=16, masked=0.3, normalize="sample")
        check(results)
        assert all(r["padding"] > 0 for r in results)


@pytest.mark.parametrize("ranks", [3, 5, 6, 7])
def test_rank_counts_that_are_no_powers_of_two(pool: WorkerPool, ranks: int) -> None:
    check(pool.run(ranks, CASE, seed=ranks, samples=12))


def test_these_plans_mix_schemes_within_one_step_and_recompute(pool: WorkerPool) -> None:
    mixes, recomputed = [], 0
    for seed in range(4):
        results = pool.run(4, CASE, seed=seed, samples=16)
        check(results)
        mixes.append({s for r in results for s in r["schemes"]})
        recomputed = max(recomputed, *(r["recomputed"] for r in results))
    assert max(len(m) for m in mixes) >= 4, mixes
    assert set().union(*mixes) == {"local", "ulysses", "ring", "allgather", "hybrid"}
    assert recomputed > 0


def test_an_idle_rank_has_no_placement_and_runs_a_dummy_under_ddp(pool: WorkerPool) -> None:
    bare = pool.run(4, CASE, seed=0, idle_rank=True)
    ddp = pool.run(4, CASE, seed=0, idle_rank=True, wrapper="ddp")
    check(bare)
    check(ddp)
    assert (bare[3]["microbatches"], ddp[3]["microbatches"], ddp[3]["dummies"]) == (0, 1, 1)
