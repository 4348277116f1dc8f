"""Out of memory: planned again where that is safe, else all ranks end with the numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import megatron_dcp as mdcp
from megatron_dcp.runtime.oom import OomReport, smaller_budget
from megatron_dcp.testing.cases.gradients import Samples, random_lengths, run_step
from megatron_dcp.testing.models import TinyModel
from megatron_dcp.testing.plans import tiny_profile
from megatron_dcp.testing.pool import WorkerPool

CASE = "megatron_dcp.testing.cases.memory:small_device_case"
PROGRAM = Path(__file__).parent / "programs" / "small_device.py"


def recovered(results: list[dict[str, Any]], first_budget: int = 150_000) -> None:
    """All ranks went on with one smaller budget; losses and gradients are those of one process."""
    assert sum(r["failures"] for r in results) > 0
    for r in results:
        assert not r["fatal"]
        assert r["digests"] == results[0]["digests"]
        assert r["losses"] == results[0]["losses"]
        assert max(r["errors"]) <= 1e-10
        assert all(abs(a - b) <= 1e-12 * abs(b) for a, b in r["losses"])
        assert r["budgets"][0] < first_budget
        assert r["budgets"] == sorted(r["budgets"], reverse=True)


@pytest.mark.parametrize("where", ["forward", "loss", "backward"])
@pytest.mark.parametrize("wrapper", ["bare", "ddp"])
def test_a_local_microbatch_may_fail_anywhere(pool: WorkerPool, wrapper: str, where: str) -> None:
    recovered(pool.run(2, CASE, wrapper=wrapper, where=where, capacity=90_000))


@pytest.mark.parametrize("victims", [[1], [0, 1, 2, 3]])
def test_four_ranks_that_share_samples(pool: WorkerPool, victims: list[int]) -> None:
    """Blocks of two: whoever meets the rank that failed learns it before the first message."""
    recovered(
        pool.run(4, CASE, strategy="packed:2", capacity=90_000, victims=victims, measure=True)
    )


def test_fsdp2_before_the_first_gather(pool: WorkerPool) -> None:
    recovered(pool.run(2, CASE, wrapper="fsdp2", capacity=90_000, victims=[1]))


def test_steps_planned_ahead_are_planned_again(pool: WorkerPool) -> None:
    results = pool.run(2, CASE, capacity=90_000, steps=4, plan_ahead=3)
    recovered(results)
    assert max(results[0]["budgets"][1:]) <= results[0]["budgets"][0]


def test_a_broken_attempt_leaves_no_events(pool: WorkerPool) -> None:
    lengths = random_lengths(0, 48, 60)
    results = pool.run(2, CASE, capacity=90_000, strategy="packed:1", steps=4, measure=True)
    recovered(results)
    assert sum(r["tokens"] for r in results) == sum(lengths)


def test_where_no_smaller_budget_helps_all_ranks_say_the_same(pool: WorkerPool) -> None:
    results = pool.run(2, CASE, capacity=1000)
    assert len({r["fatal"] for r in results}) == 1
    text = results[0]["fatal"]
    assert "No smaller budget can hold the longest sample" in text
    assert "The plan expected" in text
    assert "held: resident" in text


def test_the_next_budget_is_below_what_failed_and_above_what_is_needed() -> None:
    def report(expected: int) -> OomReport:
        return OomReport(
            rank=0, step=0, where="", samples=(1,), lengths=(9,), expected_bytes=expected,
            budget_bytes=1000, held={}, error="",
        )  # fmt: skip

    assert smaller_budget([report(900), report(800)], 1000, 100, 0) == 100 + 700 * 9 // 10
    assert smaller_budget([report(800)], 1000, 100, 790) == 790
    assert smaller_budget([report(800)], 1000, 100, 800) is None
    assert smaller_budget([report(0)], 1000, 0, 0) == 900  # outside of a microbatch


def test_a_lowered_budget_is_resumed(tmp_path: Path) -> None:
    from megatron_dcp.runtime.checkpoint import load_checkpoint, save_checkpoint

    data = Samples(random_lengths(0, 12, 20), 0)
    engines = []
    for _ in range(2):
        engine = mdcp.initialize(TinyModel(), None, cost=tiny_profile(), plan_ahead=0)
        loader = engine.dataloader(data, global_batch_size=6, lengths="lengths")
        engines.append((engine, loader))
    first, loader = engines[0]
    first.limit_budget(123_000)
    run_step(first, next(iter(loader)))
    save_checkpoint(first, loader, tmp_path)
    second, loader = engines[1]
    load_checkpoint(second, loader, tmp_path)
    assert second.settings.budget_bytes == 123_000
    assert next(iter(loader)).plan.budget_bytes == 123_000


def test_the_launcher_starts_again_from_the_checkpoint_with_a_smaller_budget(
    tmp_path: Path,
) -> None:
    """Rank 1 fails in step 2 after its first message: all ranks end, and the job starts again."""
    command = [sys.executable, "-m", "megatron_dcp.cli.elastic", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node=2", str(PROGRAM), str(tmp_path), "332000", "20"],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert "started again with a budget of 330076 bytes" in done.stderr
    assert "rank 1 ran out of memory in step 2, slot 0, placement on data ranks 0..1" in done.stderr
    lines = [json.loads(x) for x in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [x["step"] for x in lines] == [0, 1, 2, 3, 4, 5]
    assert [x["budget"] for x in lines] == [10**6] * 2 + [330_076] * 4
    assert [x["loss"] for x in lines] == pytest.approx(_losses(6), rel=1e-9)


def _losses(steps: int) -> list[float]:
    """The program's losses on one rank that never runs out of memory."""
    import torch

    model = TinyModel(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    engine = mdcp.initialize(model, optimizer, cost=tiny_profile())
    data = Samples(random_lengths(0, 60, 60), 0)
    loader = engine.dataloader(data, global_batch_size=10, lengths="lengths", steps=steps)
    return [run_step(engine, step) for step in loader]
