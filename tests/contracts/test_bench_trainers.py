"""`mdcp bench end-to-end --trainer NAME` on the real packages, in its small version."""

import json
import os
import subprocess
import sys

import pytest

from megatron_dcp.observe.summary import load_summary

STATIC = {
    "torch": ["static:1", "static:2", "static", "kk@all"],
    "deepspeed": ["cp:2", "static:1", "static:2", "static"],
    "hf": ["trl-packing:1", "trl-packing:2", "static"],
    "megatron": ["cp:2", "packed:2", "megatron"],
}
PACKAGES = {"torch": "torch", "deepspeed": "deepspeed", "hf": "trl", "megatron": "megatron.core"}


@pytest.mark.parametrize(
    "trainer", ["torch", *(pytest.param(t, marks=pytest.mark.nightly) for t in list(STATIC)[1:])]
)
def test_a_trainer_against_its_own_static_settings(tmp_path, trainer):
    pytest.importorskip(PACKAGES[trainer])
    done = subprocess.run(
        [sys.executable, "-m", "megatron_dcp", "bench", "end-to-end", "--trainer", trainer,
         "--quick", "--max-length", "256", "--repeats", "1", "--sets", "heavy", "--json",
         "--out", str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=290,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    rows = json.loads(done.stdout)["rows"]
    assert {r["bar"] for r in rows} == {None}  # goals are the native trainer's
    folder = f"{trainer}-7b-cross-node-heavy"
    summary = load_summary(tmp_path / folder)
    assert list(summary["strategies"]) == ["dcp", *STATIC[trainer]]
    assert summary.get("failed") is None
    losses = [s["loss"] for s in summary["strategies"].values()]
    for found in losses:
        assert found == pytest.approx(losses[0], rel=1e-4)  # the same samples and weights
    for name in summary["strategies"]:
        told = {r["metric"]: r["value"] for r in rows if r["case"] == f"{folder} {name}"}
        assert told["throughput"] > 0
        assert 0 <= told["idle"] < 100
        assert told["planner"] >= 0
