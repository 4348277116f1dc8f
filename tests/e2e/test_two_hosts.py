"""Two hosts on one machine: two network namespaces joined by a veth pair, torchrun on each.

The link is cut in the middle of a run. Every rank has to end, within the watchdog's time-out and a
margin, with a message that says what it waited for; nobody hangs. Needs root and iproute2.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WATCHDOG_S = 10
ADDRESSES = ("10.91.7.1", "10.91.7.2")


def ip(*words, check=True):
    return subprocess.run(
        ["ip", *words], check=check, capture_output=True, text=True, timeout=20
    ).stdout


def why_not():
    if shutil.which("ip") is None:
        return "ip not found; install iproute2"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"mdcp-try-{os.getpid()}"
    try:
        ip("netns", "add", name)
        ip("netns", "del", name)
    except subprocess.SubprocessError as error:
        return f"network namespaces cannot be made here: {error}"
    return ""


REASON = why_not()
pytestmark = [pytest.mark.skipif(bool(REASON), reason=REASON), pytest.mark.timeout(400)]


@pytest.fixture
def hosts():
    """Names of two namespaces; h0 has 10.91.7.1 on v0, h1 has 10.91.7.2 on v1."""
    tag = os.getpid()
    names = [f"mdcp{tag}h{i}" for i in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "v0", "netns", names[0], "type", "veth", "peer", "name", "v1",
           "netns", names[1])  # fmt: skip
        for i, name in enumerate(names):
            ip("-n", name, "addr", "add", f"{ADDRESSES[i]}/24", "dev", f"v{i}")
            ip("-n", name, "link", "set", f"v{i}", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            ip("netns", "del", name, check=False)


def start(host, i, folder):
    """One host's share, as its user would start it."""
    env = {
        **os.environ,
        "MDCP_PYTHON": sys.executable,
        "MDCP_RANKS_PER_NODE": "1",
        "MDCP_IFNAME": f"v{i}",
        "MDCP_NODE_ADDR": ADDRESSES[i],
        "PYTHONPATH": str(ROOT),
    }
    command = [
        "ip", "netns", "exec", host, str(ROOT / "scripts/launch/torchrun.sh"),
        "--nodes", "2", "--head", f"{ADDRESSES[0]}:29400",
        "train", "--train-steps", "5000", "--global-batch", "6", "--max-length", "512",
        "--strategies", "packed:2", "--watchdog-s", str(WATCHDOG_S), "--out", str(folder / "run"),
    ]  # fmt: skip
    log = (folder / f"host{i}.log").open("w")
    with log:
        return subprocess.Popen(
            command, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True
        )


def end(process):
    """The process group of a host's launcher, its ranks included."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=30)


def log_of(folder, i):
    return (folder / f"host{i}.log").read_text()


def wait_for_steps(path, count, processes, folder, seconds=150):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if path.exists() and len(path.read_text().splitlines()) >= count:
            return
        assert all(p.poll() is None for p in processes), log_of(folder, 0) + log_of(folder, 1)
        time.sleep(0.3)
    raise AssertionError(log_of(folder, 0)[-4000:] + log_of(folder, 1)[-4000:])


def ranks_in(host):
    """Ids of the processes of a host that are ranks, not launchers."""
    found = []
    for pid in ip("netns", "pids", host).split():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"train" in words and b"megatron_dcp.cli.elastic" not in words:
            found.append(int(pid))
    return found


def wait_for_the_end(hosts, seconds):
    """Seconds until no rank is left. The launchers take longer: they try to say goodbye."""
    begin = time.monotonic()
    while left := {h: ranks for h in hosts if (ranks := ranks_in(h))}:
        assert time.monotonic() - begin < seconds, f"still running after the cut: {left}"
        time.sleep(0.3)
    return time.monotonic() - begin


def test_a_cut_link_ends_both_hosts_and_says_why(hosts, tmp_path):
    processes = [start(host, i, tmp_path) for i, host in enumerate(hosts)]
    try:
        steps = tmp_path / "run" / "steps.jsonl"
        wait_for_steps(steps, 3, processes, tmp_path)
        assert [len(ranks_in(h)) for h in hosts] == [1, 1]
        ip("-n", hosts[1], "link", "set", "v1", "down")
        took = wait_for_the_end(hosts, 6 * WATCHDOG_S)
    finally:
        for process in processes:
            end(process)
    print(f"both hosts ended {took:.1f} s after the cut")
    texts = [log_of(tmp_path, i) for i in range(2)]
    done = [json.loads(x)["step"] for x in steps.read_text().splitlines()]
    assert done == list(range(len(done)))
    for rank, text in enumerate(texts):
        said = rf"mdcp watchdog: rank {rank} has (waited|had no answer from).* in step \d+"
        assert re.search(said, text), text[-5000:]
