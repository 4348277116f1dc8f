"""Lockstep domains: equal slots; dummies take part in every collective and add exactly zero."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_dcp.testing.pool import WorkerPool

CASE = "megatron_dcp.testing.cases.gradients:gradient_case"

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "masked": {"masked": 0.5},
    "idle-rank": {"idle_rank": True},
    "sample-normalized": {"normalize": "sample", "masked": 0.3},
    "few-samples": {"samples": 2},
}


def check(results: list[dict[str, Any]]) -> None:
    for rank, r in enumerate(results):
        assert r["error"] <= 1e-10, f"rank {rank}: {r['error']} in {r['where']}"
        assert r["loss_error"] <= 1e-12


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_fsdp2_gradients(pool: WorkerPool, ranks: int, option: str) -> None:
    results = pool.run(ranks, CASE, seed=2, wrapper="fsdp2", **OPTIONS[option])
    check(results)
    assert len({r["microbatches"] for r in results}) == 1, "equal slot counts"


@pytest.mark.parametrize("wrapper", ["bare", "ddp", "fsdp2"])
def test_a_rank_of_dummies_only(pool: WorkerPool, wrapper: str) -> None:
    results = pool.run(4, CASE, seed=0, wrapper=wrapper, idle_rank=True, lockstep="all")
    check(results)
    assert results[3]["dummies"] == results[3]["microbatches"] > 0


@pytest.mark.parametrize("domain", ["1", "2", "4"])
@pytest.mark.parametrize("wrapper", ["bare", "ddp"])
def test_domains_smaller_than_all_ranks(pool: WorkerPool, wrapper: str, domain: str) -> None:
    for seed in (0, 5):
        check(pool.run(4, CASE, seed=seed, wrapper=wrapper, lockstep=domain))


def test_fsdp2_on_eight_ranks(pool: WorkerPool) -> None:
    check(pool.run(8, CASE, seed=1, wrapper="fsdp2", samples=12))


@pytest.mark.parametrize("option", OPTIONS)
def test_fsdp2_that_keeps_parameters_runs_unequal_counts(pool: WorkerPool, option: str) -> None:
    """Parameters gathered once, gradients reduced once, in a closing dummy of all ranks."""
    results = pool.run(4, CASE, seed=1, wrapper="fsdp2", backend="fsdp2-keep", **OPTIONS[option])
    check(results)
    assert len({r["microbatches"] for r in results}) > 1


@pytest.mark.parametrize("option", OPTIONS)
def test_hsdp_keeps_step_inside_a_node_alone(pool: WorkerPool, option: str) -> None:
    """2 nodes x 2 ranks: parameters are sharded inside a node, nodes run other counts."""
    results = pool.run(4, CASE, seed=5, wrapper="hsdp", ranks_per_node=2, **OPTIONS[option])
    check(results)
    assert {r["lockstep"] for r in results} == {2}
    counts = [r["microbatches"] for r in results]
    assert counts[0] == counts[1], "equal inside a node"
    assert counts[2] == counts[3]


@pytest.mark.parametrize("strategy", [None, "dcp", "static"])
def test_hsdp_blocks_across_nodes(pool: WorkerPool, strategy: str | None) -> None:
    """Samples on one rank, on a node and on both nodes in one step."""
    seen, uneven = set(), False
    for seed in range(4):
        results = pool.run(
            4, CASE, seed=seed, wrapper="hsdp", ranks_per_node=2, strategy=strategy, longest=400
        )
        check(results)
        seen |= set(results[0]["degrees"])
        uneven |= results[0]["microbatches"] != results[2]["microbatches"]
    if strategy is None:
        assert seen == {1, 2, 4}
        assert uneven, "nodes that run different numbers of microbatches"


def test_hsdp_driven_as_fsdp2_keeps_all_ranks_in_step(pool: WorkerPool) -> None:
    results = pool.run(4, CASE, seed=5, wrapper="hsdp", backend="fsdp2")
    check(results)
    assert {r["lockstep"] for r in results} == {4}
    assert len({r["microbatches"] for r in results}) == 1
