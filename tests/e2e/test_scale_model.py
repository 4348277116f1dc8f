"""scripts/dev/scale_model.sh: hosts of this machine with links of a given speed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.test_two_hosts import REASON, ROOT, ip

SCRIPT = ROOT / "scripts" / "dev" / "scale_model.sh"
PROGRAM = Path(__file__).parent / "programs" / "link_speed.py"


def run(*words, **env):
    return subprocess.run(
        ["bash", str(SCRIPT), *words],
        env={**os.environ, "MDCP_PYTHON": sys.executable, **env},
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip


def namespaces():
    return {line.split()[0] for line in ip("netns", "list").splitlines() if line}


@pytest.mark.skipif(bool(REASON), reason=REASON)
@pytest.mark.parametrize(("rate", "bytes_per_s"), [("80mbit", 10e6)])
def test_a_link_carries_what_it_was_given(tmp_path, rate, bytes_per_s):
    """8 MB take as long as the rate says: not faster (the bucket aside), and not much slower."""
    before = namespaces()
    done = run("-b", rate, "-o", str(tmp_path), str(PROGRAM), str(tmp_path / "speed.json"), "8")
    logs = "".join(p.read_text() for p in sorted(tmp_path.glob("host*.log")))
    assert done.returncode == 0, done.stderr + logs[-4000:]
    assert "measured" in done.stdout
    found = json.loads((tmp_path / "speed.json").read_text())
    measured = found["bytes"] / found["seconds"]
    print(f"{rate}: {measured / 1e6:.2f} MB/s")
    assert 0.6 * bytes_per_s <= measured <= 1.1 * bytes_per_s
    assert namespaces() <= before, "nothing is left"


@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_a_failing_job_gives_its_status_and_leaves_nothing(tmp_path):
    before = namespaces()
    done = run("-n", "1", "-o", str(tmp_path), str(tmp_path / "absent.py"))
    assert done.returncode != 0
    assert f"output of all hosts in {tmp_path}" in done.stderr
    assert namespaces() <= before


def test_what_is_missing_is_said(tmp_path):
    (tmp_path / "bash").symlink_to("/bin/bash")
    for tool in ("dirname", "id", "awk"):
        found = subprocess.run(["which", tool], capture_output=True, text=True, check=True)
        (tmp_path / tool).symlink_to(found.stdout.strip())
    done = run("train", PATH=str(tmp_path))
    assert done.returncode == 2
    assert "ip not found: install iproute2" in done.stderr
    assert run("-n", "0", "train").returncode == 2
