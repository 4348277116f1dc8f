"""TP or PP beside data ranks: several DP x CP planes run one plan, each over its own ranks."""

from __future__ import annotations

import pytest

from megatron_dcp.testing.pool import WorkerPool

CASE = "megatron_dcp.testing.cases.gradients:gradient_case"


@pytest.mark.parametrize("planes", [[[0, 2], [1, 3]], [[0, 1], [2, 3]], [[0], [1], [2], [3]]])
def test_planes_of_four_ranks(pool: WorkerPool, planes: list[list[int]]) -> None:
    """Strided planes (TP innermost), blocked ones (PP outermost), planes of one data rank."""
    for seed in (0, 1):
        results = pool.run(4, CASE, seed=seed, planes=planes)
        assert max(r["error"] for r in results) <= 1e-10
        assert len({r["loss"] for r in results}) == 1


def test_planes_must_hold_every_rank_once(pool: WorkerPool) -> None:
    with pytest.raises(Exception, match="must hold each of the 2 ranks"):
        pool.run(2, CASE, seed=0, planes=[[0], [0]])
