"""DDP, FSDP2, HSDP and plain modules: parameters after whole steps equal one process's."""

from __future__ import annotations

import pytest

from megatron_dcp.testing.pool import WorkerPool

CASE = "megatron_dcp.testing.cases.backends:backend_case"
KINDS = ["bare", "ddp", "fsdp2", "fsdp2-root", "fsdp2-keep"]
LOCKSTEP = {"fsdp2", "fsdp2-root"}


def check(results: list[dict], kind: str) -> None:
    """float64: equal to rounding, on every rank alike; the descriptor is the expected one."""
    for r in results:
        assert r["error"] <= 1e-13, (kind, r["error"])
        assert r["loss_error"] <= 1e-12
        assert r["backend"] == r["expected"]
        assert r["losses"] == results[0]["losses"]
    ranks = len(results)
    domain = 2 if kind == "hsdp" else ranks if kind in LOCKSTEP else 1
    assert {r["lockstep"] for r in results} == {domain}
    if kind in LOCKSTEP:
        assert len({tuple(r["counts"]) for r in results}) == 1


@pytest.mark.parametrize("seed", [3, 4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_steps_equal_one_process(
    pools: dict[int, WorkerPool], ranks: int, kind: str, seed: int
) -> None:
    check(pools[ranks].run(ranks, CASE, kind=kind, seed=seed), kind)


@pytest.mark.parametrize("kind", ["hsdp", "hsdp-keep"])
def test_hsdp_steps_equal_one_process(pool4: WorkerPool, kind: str) -> None:
    check(pool4.run(4, CASE, kind=kind, seed=5), kind)


@pytest.mark.parametrize("kind", ["bare", "ddp", "fsdp2", "fsdp2-keep"])
def test_rank_without_placements(pool2: WorkerPool, kind: str) -> None:
    """The last rank has no placement at all: 0 microbatches, or dummies where they are needed."""
    results = pool2.run(2, CASE, kind=kind, seed=6, idle_rank=True)
    check(results, kind)
    if kind == "bare":
        assert results[1]["counts"] == [0, 0]
    elif kind == "ddp":
        assert results[1]["counts"] == [1, 1]
        assert results[1]["dummies"] == 2


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "fsdp2-keep", "hsdp"])
def test_clipping_after_the_reduction(pools: dict[int, WorkerPool], kind: str) -> None:
    ranks = 4 if kind == "hsdp" else 2
    results = pools[ranks].run(ranks, CASE, kind=kind, seed=7, max_grad_norm=0.3)
    check(results, kind)


def test_counts_differ_between_ranks_where_they_may(pool4: WorkerPool) -> None:
    """Unequal counts do happen: DDP reducing in every backward would be wrong without hanging."""
    results = pool4.run(4, CASE, kind="ddp", seed=3)
    assert len({tuple(r["counts"]) for r in results}) > 1


def test_fsdp2_with_tensor_parallelism_over_a_device_mesh(pool4: WorkerPool) -> None:
    """2 data ranks x 2 tensor ranks: planes run the same plan, each on its own heads."""
    seen = set()
    for seed in (3, 4):
        for r in pool4.run(
            4, "megatron_dcp.testing.cases.tensor_parallel:tensor_parallel_case", seed=seed
        ):
            assert r["error"] <= 1e-10, r["where"]
            assert r["loss_error"] <= 1e-12
            assert (r["backend"], r["data_ranks"]) == ("fsdp2", 2)
            seen |= set(r["degrees"])
    assert seen == {1, 2}
