"""A real Slurm with two nodes on this machine: submit, preempt by a signal, requeue, exact resume.

`scripts/dev/slurm_local.sh` starts munge, a controller and two node daemons as root, in a folder of
this test; they are stopped at the end. Skipped with a reason where that cannot be.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.contracts.megatron_env import own_python

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("slurmctld", "slurmd", "sbatch", "srun", "munged")
MISSING = [t for t in TOOLS if shutil.which(t) is None]
STEPS = 20

pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"{MISSING} not found; install slurm-wlm and munge"),
    pytest.mark.skipif(os.geteuid() != 0, reason="slurmd needs root"),
    pytest.mark.timeout(540),
]


def tool(*command, env, check=True):
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
    )
    assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout.strip()


@pytest.fixture(scope="module")
def slurm():
    """Environment in which sbatch reaches the two nodes. The path is short: sockets need that."""
    folder = Path(f"/tmp/mdcp-slurm-{os.getpid()}")
    env = {**os.environ, "MDCP_SLURM_DIR": str(folder)}
    script = str(ROOT / "scripts/dev/slurm_local.sh")
    try:
        conf = tool(script, "up", env=env)
        yield {**env, "SLURM_CONF": conf}
    finally:
        tool(script, "down", env=env, check=False)


def submit(slurm, out, cost, **more):
    env = {
        **slurm,
        "MDCP_ROOT": str(ROOT),
        "MDCP_PYTHON": sys.executable,
        "MDCP_RANKS_PER_NODE": "1",
        "MDCP_IFNAME": "lo",
        **more,
    }
    words = tool(
        "sbatch", "--parsable", "--nodes=2", f"--output={out}.log", f"--chdir={ROOT}",
        str(ROOT / "scripts/launch/slurm.sbatch"), "train", "--train-steps", str(STEPS), "--resume",
        "--checkpoint-every", "50", "--global-batch", "6", "--max-length", "512",
        "--strategies", "dcp", "--cost", str(cost), "--out", str(out), env=env,
    )  # fmt: skip
    return words.split(";")[0]


def state(slurm, job):
    return dict(
        item.split("=", 1)
        for item in tool("scontrol", "show", "job", job, "--oneliner", env=slurm).split()
        if "=" in item
    )


def wait_for(slurm, job, condition, out, seconds=200):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition(found := state(slurm, job)):
            return found
        time.sleep(0.5)
    log = Path(f"{out}.log")
    raise AssertionError(f"{state(slurm, job)}\n{log.read_text()[-6000:] if log.exists() else ''}")


def finished(slurm, job, out):
    """Waits for the end; returns the log."""
    found = wait_for(
        slurm, job, lambda s: s["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"), out
    )
    text = Path(f"{out}.log").read_text()
    assert found["JobState"] == "COMPLETED", text[-6000:]
    return text


def lines(out):
    path = out / "steps.jsonl"
    return [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []


def what_must_agree(out):
    """Everything of a step but how long its planning took."""
    return [{k: v for k, v in x.items() if k != "planner_exposed_ms"} for x in lines(out)]


@pytest.fixture(scope="module")
def cost(tmp_path_factory):
    """One profile for both runs: a plan is a function of it, and calibration would differ."""
    from megatron_dcp.cost import CostProfile, Link, ModelShape, dumps
    from megatron_dcp.cost.profile import Overhead

    path = tmp_path_factory.mktemp("cost") / "cost.json"
    profile = CostProfile(
        name="two-nodes",
        model=ModelShape(
            layers=4, heads=4, kv_heads=2, head_dim=32, hidden=128, vocab=256, element_bytes=4
        ),
        pairs="causal",
        linear_us_per_token=20.0,
        attn_us_per_pair=0.01,
        overhead_us=Overhead(async_=500.0, lockstep=500.0),
        links=(Link(max_degree=2, us_per_byte=0.001, latency_us=50.0),),
        kept_bytes_per_token_layer=8208,
        checkpoint_bytes_per_token_layer=512,
        budget_bytes=64_000_000_000,
    )
    path.write_text(dumps(profile))
    return path


def test_preempted_requeued_and_resumed_exactly(slurm, cost, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    finished(slurm, submit(slurm, whole, cost), whole)
    assert [x["step"] for x in lines(whole)] == list(range(STEPS))

    job = submit(slurm, cut, cost)
    wait_for(slurm, job, lambda _: len(lines(cut)) >= 3, cut)
    tool("scancel", "--batch", "--signal=USR1", job, env=slurm)
    wait_for(slurm, job, lambda s: int(s["Restarts"]) >= 1, cut)
    done_before = len(lines(cut))
    assert 3 <= done_before < STEPS, "it was to stop early, at the end of a step"
    text = finished(slurm, job, cut)

    assert "telling every rank to checkpoint" in text
    assert "requeueing" in text
    assert f"resumed after {done_before} steps" in text
    assert what_must_agree(cut) == what_must_agree(whole)


@pytest.mark.nightly
def test_a_run_that_fails_is_not_requeued(slurm, cost, tmp_path):
    out = tmp_path / "bad"
    job = submit(slurm, out, tmp_path / "no-such-profile.json")
    found = wait_for(slurm, job, lambda s: s["JobState"] in ("FAILED", "COMPLETED"), out)
    assert found["JobState"] == "FAILED"
    assert found["Restarts"] == "0"
    assert "no-such-profile.json" in Path(f"{out}.log").read_text()


def test_srun_starts_the_ranks_of_a_megatron_script(slurm):
    """`srun mdcp launch SCRIPT --mdcp`: ranks and rendezvous from Slurm's variables alone."""
    example = ROOT / "examples" / "megatron_gpt"
    done = subprocess.run(
        [
            "srun", "--nodes=2", "--ntasks-per-node=1", "--label", f"--chdir={ROOT}",
            own_python(), "-m", "megatron_dcp", "launch", "--allow-cpu",
            str(example / "pretrain.py"), "--mdcp", *(example / "tiny.args").read_text().split(),
            "--train-iters", "2",
        ],
        env={**slurm, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    text = done.stdout + done.stderr
    assert done.returncode == 0, text[-6000:]
    last = [x for x in text.splitlines() if "iteration        2/" in x]
    assert len(last) == 1, text[-6000:]
    assert last[0].startswith("1: "), "Megatron logs on the last rank, the task on the second node"
