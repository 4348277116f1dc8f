"""Real DeepSpeed engines, ZeRO-0 to 3: parameters after whole steps equal one process's."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dcp.testing.pool import WorkerPool

pytest.importorskip("deepspeed")

CASE = "megatron_dcp.testing.cases.backends:backend_case"
EXACT = 2.4e-7  # fp32: the rounding of a few sums of another order
KINDS = ["zero0", "zero1", "zero2", "zero2-coalesced", "zero3"]
LOCKSTEP = {"zero2", "zero2-offload", "zero2-buckets", "zero3"}


def check(results: list[dict], kind: str) -> None:
    for r in results:
        assert r["error"] <= EXACT, (kind, r["error"])
        assert r["loss_error"] <= 2e-6
        assert r["backend"] == r["expected"]
        assert r["losses"] == results[0]["losses"]
    assert {r["lockstep"] for r in results} == {len(results) if kind in LOCKSTEP else 1}
    if kind in LOCKSTEP:
        assert len({tuple(r["counts"]) for r in results}) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_steps_equal_one_process(pools: dict[int, WorkerPool], ranks: int, kind: str) -> None:
    check(pools[ranks].run(ranks, CASE, kind=kind, seed=3), kind)


@pytest.mark.parametrize("kind", ["zero1", "zero2-offload", "zero2-buckets", "zero1-buckets"])
def test_more_forms_equal_one_process(pool2: WorkerPool, kind: str) -> None:
    """Optimizer on the CPU, and buckets so small that several are reduced in one backward."""
    check(pool2.run(2, CASE, kind=kind, seed=4), kind)


@pytest.mark.parametrize("kind", ["zero0", "zero1", "zero2", "zero3"])
def test_rank_without_placements(pool2: WorkerPool, kind: str) -> None:
    check(pool2.run(2, CASE, kind=kind, seed=6, idle_rank=True), kind)


@pytest.mark.parametrize("kind", ["zero0", "zero1", "zero2", "zero3"])
def test_clipping_is_deepspeeds_own(pool2: WorkerPool, kind: str) -> None:
    check(pool2.run(2, CASE, kind=kind, seed=7, max_grad_norm=0.3), kind)


CONFIG = "megatron_dcp.testing.cases.backends:config_case"


@pytest.mark.parametrize(
    ("stage", "coalesce"), [(1, False), (2, False), (2, True), (3, False)], ids=str
)
def test_config_file_and_exact_resume(
    pool2: WorkerPool, tmp_path: Path, stage: int, coalesce: bool
) -> None:
    """A stock config with the section; DeepSpeed's own checkpoint; the same losses after it."""
    results = pool2.run(2, CONFIG, stage=stage, directory=str(tmp_path), coalesce=coalesce)
    for r in results:
        assert r["resumed"] == r["whole"]
        assert r["error"] == 0.0
        assert r["backend"] == ("zero2-coalesced" if coalesce else f"zero{stage}")
        assert r["clipping"] == 1.0
        assert len(set(r["whole"])) == 4


def test_bf16_follows_fp32(pool2: WorkerPool, tmp_path: Path) -> None:
    """bf16 weights keep 8 bits: losses agree to a few of their last digits (2**-8 each)."""
    exact = pool2.run(2, CONFIG, stage=1, directory=str(tmp_path))[0]["whole"]
    half = pool2.run(2, CONFIG, stage=1, directory=str(tmp_path), bf16=True)[0]["whole"]
    assert half == pytest.approx(exact, rel=4 * 2**-8)
