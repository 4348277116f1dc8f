"""scripts/reproduce: a clear refusal without a GPU, and the single-GPU path small on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_dcp.observe.summary import load_summary

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "reproduce"
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def script(name, *options, **env):
    return subprocess.run(
        ["bash", str(SCRIPTS / name), *options],
        env={**os.environ, "PYTHON": sys.executable, "MDCP_PYTHON": sys.executable, **env},
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip


def test_single_gpu_replays_a_32_rank_plan_on_the_cpu(tmp_path):
    done = script("single_gpu.sh", "--device", "cpu", "--quick", "--max-length", "128", "--sets",
                  "heavy", "--strategies", "dcp,packed,static", "--out", str(tmp_path))  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    summary = load_summary(tmp_path / "virtual32-heavy")
    assert summary["config"]["ranks"] == 32
    assert list(summary["strategies"]) == ["dcp", "packed", "static"]
    assert all(s["step_s"]["mean"] > 0 for s in summary["strategies"].values())
    bars = [r for r in json.loads((tmp_path / "bench.json").read_text())["rows"] if r["bar"]]
    assert [(r["baseline"], r["bar"]) for r in bars] == [("packed", 1.5)]


@no_gpu
def test_without_a_gpu_both_say_so_and_end(tmp_path):
    single = script("single_gpu.sh", "--out", str(tmp_path / "out"))
    assert single.returncode == 1
    assert "no CUDA device" in single.stderr
    assert "--device cpu" in single.stderr
    cluster = script("cluster.sh", "--nodes", "4", "--head", "localhost")
    assert cluster.returncode == 2
    assert "no CUDA device" in cluster.stderr
    assert not (tmp_path / "out").exists()


def test_cluster_needs_to_know_its_nodes():
    done = script("cluster.sh", "--head", "localhost")
    assert done.returncode == 2
    assert "--nodes N and --head HOST" in done.stderr


def test_cluster_submits_one_job_of_all_nodes(tmp_path):
    """From a machine without GPUs: what sbatch is given."""
    fake = tmp_path / "sbatch"
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    done = script("cluster.sh", "--slurm", "--nodes", "4", "--repeats", "3", MDCP_HARDWARE="h100",
                  PATH=f"{tmp_path}:{os.environ['PATH']}")  # fmt: skip
    assert done.returncode == 0, done.stderr
    given = done.stdout.splitlines()
    assert given[:3] == ["-N", "4", "scripts/launch/slurm.sbatch"]
    assert given[given.index("--ranks") + 1] == "32"
    assert given[given.index("--hardware") + 1] == "h100"
    assert given[-2:] == ["--repeats", "3"]
