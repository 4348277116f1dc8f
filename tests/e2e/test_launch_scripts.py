"""scripts/launch beside recorders of the tools that they call: what these are given, and what
becomes of their status. `test_slurm.py` runs the same scripts on a real Slurm."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "scripts" / "launch"

SCONTROL = """case "$2" in
  hostnames) echo n1 ;;
  node) echo "NodeName=n1 NodeAddr=10.0.0.1 Port=1" ;;
  *) echo "$@" >>"$RECORD/scontrol" ;;
esac
"""


@pytest.fixture
def tools(tmp_path):
    """Environment whose PATH begins with tools made from shell lines; `tools(srun="exit 85")`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MDCP_", "SLURM_", "PYTHON"))}

    def make(**lines):
        for name, text in lines.items():
            tool = folder / name.replace("_", "-")
            tool.write_text(f"#!/bin/bash\n{text}\n")
            tool.chmod(0o755)
        return {**env, "PATH": f"{folder}:{env['PATH']}", "RECORD": str(tmp_path)}

    return make


def job(name, *words, env, **more):
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_NNODES": "1",
             "SLURM_SUBMIT_DIR": str(ROOT)}  # fmt: skip
    return subprocess.Popen(
        ["bash", str(LAUNCH / name), *words], env={**env, **slurm, **more}, cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


@pytest.mark.parametrize("status", [0, 3])
def test_a_job_ends_with_the_status_of_its_step(tools, status):
    with job("slurm.sbatch", "train", env=tools(scontrol=SCONTROL, srun=f"exit {status}")) as done:
        done.communicate(timeout=60)
    assert done.returncode == status


def test_a_step_that_ends_while_the_signal_is_passed_on_is_requeued(tools, tmp_path):
    """Its checkpoint is written and its status 85, while the script still handles the signal."""
    env = tools(
        scontrol=SCONTROL,
        srun='touch "$RECORD/started"; until [ -e "$RECORD/signal" ]; do sleep 0.05; done; exit 85',
        scancel='touch "$RECORD/signal"; sleep 1',
    )
    with job("slurm.sbatch", "train", env=env) as done:
        deadline = time.monotonic() + 30
        while not (tmp_path / "started").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        done.send_signal(signal.SIGUSR1)
        text, _ = done.communicate(timeout=60)
    assert done.returncode == 0, text
    assert (tmp_path / "scontrol").read_text() == "requeue 7\n"


def test_pyxis_is_asked_for_the_image_on_sruns_command_line(tools, tmp_path):
    """Every release takes its options there; which variables one reads has changed."""
    recorder = 'printf "%s\\n" "$@" >"$RECORD/srun"; env >"$RECORD/env"'
    with job(
        "slurm_pyxis.sbatch", "examples/torch_minimal/train.py", "--steps", "2",
        env=tools(scontrol=SCONTROL, srun=recorder), MDCP_IMAGE="/images/a b.sqsh",
        MDCP_MOUNTS="/data:/data",
    ) as done:  # fmt: skip
        text, _ = done.communicate(timeout=60)
    assert done.returncode == 0, text
    given = (tmp_path / "srun").read_text().splitlines()
    before = given[: given.index(f"{ROOT}/scripts/launch/torchrun.sh")]
    assert "--container-image=/images/a b.sqsh" in before
    assert f"--container-mounts={ROOT}:{ROOT},/data:/data" in before
    assert f"--container-workdir={ROOT}" in before
    assert given[-3:] == ["examples/torch_minimal/train.py", "--steps", "2"]
    inside = dict(x.split("=", 1) for x in (tmp_path / "env").read_text().splitlines() if "=" in x)
    assert inside["MDCP_PYTHON"] == "python3"
    # The image's package runs, not the checkout of the working directory.
    assert inside["PYTHONSAFEPATH"] == "1"
    assert inside["PYTHONPATH"] == f"{ROOT}/examples/torch_minimal"


@pytest.mark.parametrize(
    ("gpus", "more", "ranks"),
    [(0, {}, 2), (1, {}, 1), (8, {}, 8), (8, {"MDCP_RANKS_PER_NODE": "1"}, 1)],
)
def test_ranks_on_one_machine_are_its_gpus(tools, tmp_path, gpus, more, ranks):
    lines = "\n".join(f"echo 'GPU {i}: a GPU'" for i in range(gpus))
    env = tools(nvidia_smi=lines or "exit 9", python='printf "%s\\n" "$@"')
    done = subprocess.run(
        ["bash", str(LAUNCH / "local.sh"), "train"], capture_output=True, text=True, check=True,
        env={**env, "MDCP_PYTHON": str(tmp_path / "bin" / "python"), **more}, timeout=60,
    )  # fmt: skip
    given = done.stdout.splitlines()
    assert given[given.index("--nproc-per-node") + 1] == str(ranks)
    assert ("sees no GPU" in done.stderr) == (gpus == 0)
