"""Exact resume: the same plan digests and losses follow, also on another number of ranks."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_dcp.runtime.checkpoint import CheckpointError, whole_checkpoints
from megatron_dcp.runtime.preempt import STOP_STATUS
from megatron_dcp.testing.cases.resume import load_case, resume_case, write_case
from megatron_dcp.testing.pool import WorkerPool

CASE = "megatron_dcp.testing.cases.resume:resume_case"
STEPS = 8


@pytest.mark.parametrize("wrapper", ["bare", "ddp", "fsdp2"])
@pytest.mark.parametrize("stop_after", [1, 5])
def test_digests_and_losses_go_on_exactly(
    pool: WorkerPool, tmp_path: Path, wrapper: str, stop_after: int
) -> None:
    folder = str(tmp_path)
    whole = pool.run(2, CASE, folder=folder, load=False, wrapper=wrapper, steps=STEPS)[0]
    pool.run(2, CASE, folder=folder, load=False, wrapper=wrapper, stop_after=stop_after)
    rest = pool.run(2, CASE, folder=folder, load=True, wrapper=wrapper, steps=STEPS)[0]
    assert rest["start"] == stop_after
    assert rest["digests"] == whole["digests"][stop_after:]
    assert rest["samples"] == whole["samples"][stop_after:]
    assert rest["losses"] == whole["losses"][stop_after:]


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_another_number_of_ranks_keeps_the_samples_and_the_curve(
    pool: WorkerPool, tmp_path: Path, ranks: int
) -> None:
    folder = str(tmp_path)
    whole = pool.run(2, CASE, folder=folder, load=False, steps=STEPS)[0]
    pool.run(2, CASE, folder=folder, load=False, stop_after=4)
    rest = pool.run(ranks, CASE, folder=folder, load=True, steps=STEPS)[0]
    assert rest["samples"] == whole["samples"][4:]
    assert rest["losses"] == pytest.approx(whole["losses"][4:], rel=1e-9)


def test_another_strategy_or_batch_is_refused_by_name(tmp_path: Path) -> None:
    resume_case(folder=str(tmp_path), load=False, stop_after=2)
    with pytest.raises(Exception, match=r"strategy 'dcp' \(now 'static'\)"):
        resume_case(folder=str(tmp_path), load=True, strategy="static")
    with pytest.raises(Exception, match="size was 40, is 41"):
        resume_case(folder=str(tmp_path), load=True, size=41)


def test_no_checkpoint_starts_from_the_beginning(tmp_path: Path) -> None:
    assert load_case(folder=str(tmp_path / "absent")) == {"step": None}


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    write_case(folder=str(tmp_path), positions=[1, 2, 3])
    assert sorted(p.name for p in whole_checkpoints(tmp_path)) == ["step-00000002", "step-00000003"]


def test_an_unfinished_checkpoint_does_not_count(tmp_path: Path) -> None:
    write_case(folder=str(tmp_path), positions=[1, 2])
    (tmp_path / "step-00000002").rename(tmp_path / "step-00000002.part")
    assert load_case(folder=str(tmp_path)) == {"step": 1}


def damage(folder: Path, rng: random.Random) -> str:
    """Flip a bit of a file, or cut it; says what was done."""
    path = folder / rng.choice(["state.json", "tensors.safetensors"])
    data = bytearray(path.read_bytes())
    if rng.random() < 0.2:
        size = rng.randrange(len(data))
        path.write_bytes(bytes(data[:size]))
        return f"{path.name} cut to {size}"
    at, bit = rng.randrange(len(data)), rng.randrange(8)
    data[at] ^= 1 << bit
    path.write_bytes(bytes(data))
    return f"{path.name} bit {bit} of byte {at} flipped"


def damage_many(tmp_path: Path, cases: int) -> None:
    source, work = tmp_path / "source", tmp_path / "work"
    write_case(folder=str(source), positions=[1])
    rng = random.Random(7)
    from megatron_dcp.runtime.checkpoint import _verified

    for _ in range(cases):
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(source, work)
        what = damage(work / "step-00000001", rng)
        with pytest.raises(CheckpointError, match="step-00000001"):
            pytest.fail(f"accepted: {what}: {_verified(work / 'step-00000001')['step']}")


def test_every_damage_to_a_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    damage_many(tmp_path, 500)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_every_damage_to_a_checkpoint_is_refused_by_name_10000(tmp_path: Path) -> None:
    damage_many(tmp_path, 10_000)


def test_the_one_before_a_damaged_checkpoint_is_used_only_when_asked(tmp_path: Path) -> None:
    write_case(folder=str(tmp_path), positions=[3, 5])
    data = bytearray((tmp_path / "step-00000005" / "tensors.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "step-00000005" / "tensors.safetensors").write_bytes(bytes(data))
    refused = load_case(folder=str(tmp_path))
    assert "step-00000005" in refused["error"]
    assert "allow_previous" in refused["error"]
    assert load_case(folder=str(tmp_path), allow_previous=True) == {"step": 3}


def test_a_full_disk_leaves_the_checkpoints_before(tmp_path: Path) -> None:
    write_case(folder=str(tmp_path), positions=[1])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        with pytest.raises(Exception, match=r"step-00000002 was not written"):
            write_case(folder=str(tmp_path), positions=[2])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    assert load_case(folder=str(tmp_path)) == {"step": 1}


# Whole runs of `mdcp train`, killed and started again.


def start_training(folder: Path, *options: str) -> subprocess.Popen[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "megatron_dcp", "train", "--train-steps", "14",
         "--checkpoint-every", "3", "--max-length", "300", "--global-batch", "8",
         "--out", str(folder), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


def lines(folder: Path) -> list[dict[str, object]]:
    path = folder / "steps.jsonl"
    text = path.read_text().splitlines() if path.exists() else []
    keys = ("step", "digest", "loss", "samples")
    return [{k: json.loads(line)[k] for k in keys} for line in text]


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while len(lines(folder)) <= step:
        assert process.poll() is None, process.communicate()[0][-3000:]
        assert time.monotonic() < deadline, "the run did not get going"
        time.sleep(0.02)


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True,
                           check=True)  # fmt: skip
    return [int(x) for x in found.stdout.split()]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    process = start_training(folder)
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 0, output[-3000:]
    return folder


def resumed(folder: Path, uninterrupted: Path) -> None:
    process = start_training(folder, "--resume")
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 0, output[-3000:]
    assert "resumed after" in output
    assert lines(folder) == lines(uninterrupted)


@pytest.mark.parametrize(("rank", "step"), [(0, 4), pytest.param(1, 7, marks=pytest.mark.nightly)])
def test_kill_9_of_a_rank_then_restart(
    tmp_path: Path, uninterrupted: Path, rank: int, step: int
) -> None:
    process = start_training(tmp_path, "--cost", str(uninterrupted / "cost.json"))
    wait_for_step(tmp_path, step, process)
    os.kill(ranks_of(process)[rank], signal.SIGKILL)
    process.communicate(timeout=120)
    assert process.returncode != 0
    resumed(tmp_path, uninterrupted)


def test_sigusr1_finishes_the_step_and_checkpoints(tmp_path: Path, uninterrupted: Path) -> None:
    process = start_training(tmp_path, "--cost", str(uninterrupted / "cost.json"))
    wait_for_step(tmp_path, 5, process)
    os.kill(ranks_of(process)[1], signal.SIGUSR1)
    output = process.communicate(timeout=120)[0]
    assert "stopped by a signal" in output
    done = lines(tmp_path)
    assert whole_checkpoints(tmp_path / "checkpoints")
    assert f"step-{len(done):08d}" in {p.name for p in whole_checkpoints(tmp_path / "checkpoints")}
    assert f"exitcode  : {STOP_STATUS}" in output
    resumed(tmp_path, uninterrupted)
