"""TP or PP beside data ranks: several DP x CP planes run one plan, each over its own ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_dcp.dist import planes_of
from megatron_dcp.errors import ConfigError
from megatron_dcp.testing.pool import WorkerPool

CASE = "megatron_dcp.testing.cases.gradients:gradient_case"
PLANES = "megatron_dcp.testing.cases.planes"


@pytest.mark.parametrize("planes", [[[0, 2], [1, 3]], [[0, 1], [2, 3]], [[0], [1], [2], [3]]])
def test_planes_of_four_ranks(pool: WorkerPool, planes: list[list[int]]) -> None:
    """Strided planes (TP innermost), blocked ones (PP outermost), planes of one data rank."""
    for seed in (0, 1):
        results = pool.run(4, CASE, seed=seed, planes=planes)
        assert max(r["error"] for r in results) <= 1e-10
        assert len({r["loss"] for r in results}) == 1


def of_one_process(results: list[dict[str, Any]]) -> None:
    """Gradients, loss and norm; all processes hold one plan, which the first plane alone made."""
    for r in results:
        assert r["error"] <= 1e-10, r["where"]
        assert r["loss_error"] <= 1e-12
        assert r["norm_error"] <= 1e-12
        assert r["data_ranks"] == 2
        assert r["digest"] == results[0]["digest"]
        assert r["loss"] == results[0]["loss"], "every process prints the same loss"
    assert sorted(r["plans_made"] > 0 for r in results) == [False, False, True, True]


@pytest.mark.parametrize("fsdp", [False, True])
def test_tensor_parallel_2_beside_2_data_ranks(pool: WorkerPool, fsdp: bool) -> None:
    """torch's own DTensor styles, alone and under FSDP2; clipped by the norm of the whole model."""
    for seed in (1, 2):
        results = pool.run(4, f"{PLANES}:tensor_parallel_case", seed=seed, fsdp=fsdp)
        of_one_process(results)
        assert all(r["names"] == r["all_names"] for r in results)


@pytest.mark.parametrize("wrapper", ["bare", "ddp"])
def test_pipeline_of_2_stages_with_2_data_ranks(pool: WorkerPool, wrapper: str) -> None:
    """Each stage has its own parameters' gradients; the norm is that of all stages together."""
    for seed in (1, 2):
        results = pool.run(4, f"{PLANES}:pipeline_case", seed=seed, wrapper=wrapper)
        of_one_process(results)
        held = {n for r in results for n in r["names"]}
        assert sorted(held) == results[0]["all_names"]
        assert not set(results[0]["names"]) & set(results[3]["names"])


def test_a_planner_that_fails_in_the_first_plane_stops_all_planes(pool: WorkerPool) -> None:
    for r in pool.run(4, f"{PLANES}:first_plane_fails_case"):
        assert r["type"] in ("AgreementError", "PlanError", "RuntimeError")
        assert "planner crashed" in r["error"]


def test_planes_of_a_mesh() -> None:
    class Mesh:  # what planes_of reads of a DeviceMesh, which needs a process group to exist
        mesh = torch.arange(16).view(2, 2, 2, 2)
        mesh_dim_names = ("pp", "dp_replicate", "dp_shard", "tp")

    assert planes_of(Mesh()) == [
        [0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15],
    ]  # fmt: skip
    assert planes_of(Mesh(), ["dp_shard"])[1] == [1, 3]
    with pytest.raises(ConfigError, match="name the dimensions"):
        planes_of(Mesh(), ["data"])


def test_planes_must_hold_every_rank_once(pool: WorkerPool) -> None:
    with pytest.raises(Exception, match="must hold each of the 2 ranks"):
        pool.run(2, CASE, seed=0, planes=[[0], [0]])


def test_planes_must_be_ascending(pool: WorkerPool) -> None:
    """Rings would send to the rank that stands there in torch's own order."""
    with pytest.raises(Exception, match=r"plane \[1, 0\] is not ascending"):
        pool.run(2, CASE, seed=0, planes=[[1, 0]])
