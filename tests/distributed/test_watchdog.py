"""No deadlock: a rank that does not arrive ends the job with its name, and a slow one does not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_dcp.dist import DataWorld
from megatron_dcp.errors import ConfigError
from megatron_dcp.plan import load
from megatron_dcp.runtime.watchdog import EXIT_STATUS, IDLE, Watchdog

PROGRAM = Path(__file__).parent / "programs" / "stall.py"


def run(folder: Path, fault: str, *, rank: int = 1, step: int = 2, timeout_s: float = 4.0):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.run(
        [sys.executable, *launcher, str(PROGRAM), fault, str(rank), str(step), str(folder),
         str(timeout_s)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=150,
        check=False,
    )  # fmt: skip


@pytest.mark.parametrize("fault", ["sleep", "stop"])
def test_a_rank_that_does_not_arrive_is_named_and_all_ranks_end(tmp_path: Path, fault: str) -> None:
    done = run(tmp_path, fault)
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if "mdcp watchdog" in line]
    assert said, done.stderr[-3000:]
    for line in said:  # whoever noticed first, all say the same of the one that is behind
        assert "step 2, slot" in line
        assert "Did not arrive: rank 1 is at step 2" in line
    assert f"exitcode  : {EXIT_STATUS}" in done.stderr
    assert load(tmp_path / "watchdog-rank0.plan.json").step == 2
    stacks = (tmp_path / "watchdog-rank0.stacks.txt").read_text()
    assert "most recent call first" in stacks


@pytest.mark.parametrize("fault", ["slow", "clock"])
def test_a_slow_rank_and_a_clock_jump_are_left_alone(tmp_path: Path, fault: str) -> None:
    done = run(tmp_path, fault, step=0, timeout_s=20)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("finished 5") == 2
    assert "watchdog" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_rank_alone_says_that_its_own_work_is_stuck(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ended: list[int] = []
    dog = Watchdog(DataWorld(alone=True), timeout_s=0.4, directory=tmp_path, end=ended.append)
    dog.beat("reduce", step=7)
    deadline = time.monotonic() + 20
    while not ended and time.monotonic() < deadline:
        time.sleep(0.05)
    dog.close()
    assert ended == [EXIT_STATUS]
    assert "step 7, reduce" in capfd.readouterr().err


def test_time_outside_a_step_does_not_count(tmp_path: Path) -> None:
    ended: list[int] = []
    dog = Watchdog(DataWorld(alone=True), timeout_s=0.2, directory=tmp_path, end=ended.append)
    dog.beat("reduce", step=0)
    dog.beat(IDLE, step=0)
    time.sleep(1.0)
    dog.close()
    assert ended == []


def test_a_time_out_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="above 0"):
        Watchdog(DataWorld(alone=True), timeout_s=0)
