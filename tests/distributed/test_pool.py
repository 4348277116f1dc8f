"""The workers that every other distributed test relies on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_dcp.testing.pool import WorkerError, WorkerPool

pytestmark = pytest.mark.distributed
CASES = "tests.distributed.pool_cases"


def _runs(process: int) -> bool:
    """Whether a process is there and not just waiting to be reaped."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def forked() -> Iterator[WorkerPool]:
    workers = WorkerPool(limit=3, timeout_s=60, fork=True, preload=f"{CASES}:preload")
    yield workers
    workers.close()


def test_a_forked_run_has_its_own_processes_and_world(forked: WorkerPool) -> None:
    first = forked.run(3, f"{CASES}:meet")
    forked.run(3, f"{CASES}:leave_groups_behind")
    second = forked.run(3, f"{CASES}:meet")
    fewer = forked.run(2, f"{CASES}:meet")
    assert [r["sum"] for r in first + second] == [3.0] * 6
    assert [r["sum"] for r in fewer] == [1.0] * 2
    assert len({r["process"] for r in first + second + fewer}) == 8
    assert all(r["runs"] == 1 for r in first + second + fewer)
    for before, after in zip(first, second, strict=True):
        # Preloaded once, by the worker; its runs inherit that and nothing of each other.
        assert before["preloaded"] == after["preloaded"]
        assert len(before["preloaded"]) == 1
        assert before["preloaded"][0] not in (before["process"], after["process"])
        assert after["threads"] == before["threads"]


def test_workers_go_on_without_fork() -> None:
    workers = WorkerPool(limit=2, timeout_s=60)
    try:
        first, second = (workers.run(2, f"{CASES}:meet") for _ in range(2))
    finally:
        workers.close()
    assert [r["process"] for r in first] == [r["process"] for r in second]
    assert [r["runs"] for r in second] == [2, 2]


@pytest.mark.parametrize("fork", [False, True])
def test_a_death_is_told_with_its_cause_and_nothing_is_left(fork: bool) -> None:
    workers = WorkerPool(limit=2, timeout_s=60, fork=fork)
    try:
        seen = [r["process"] for r in workers.run(2, f"{CASES}:meet")]
        with pytest.raises(WorkerError, match="rank 1 died of SIGSEGV"):
            workers.run(2, f"{CASES}:die", rank=1)
        seen += [r["process"] for r in workers.run(2, f"{CASES}:meet")]  # fresh ones
    finally:
        workers.close()
    assert len(set(seen)) == 4
    deadline = time.monotonic() + 10
    while any(map(_runs, seen)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [p for p in seen if _runs(p)]
