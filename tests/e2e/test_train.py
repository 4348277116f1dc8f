"""`mdcp train` as a user runs it: torchrun, two gloo ranks, real text; then what it left behind."""

import json
import os
import subprocess
import sys

import pytest

from megatron_dcp.observe.events import read_events
from megatron_dcp.observe.summary import load_summary
from megatron_dcp.plan import check_plan, load


def mdcp_train(tmp_path, *options, ranks=2, timeout=240):
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run(
        [sys.executable, *launcher, "-m", "megatron_dcp", "train", *options],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One small comparison in the scale model, shared by the tests below."""
    folder = tmp_path_factory.mktemp("train")
    done = mdcp_train(
        folder, "--out", "run", "--max-length", "1024", "--memory-tokens", "600",
        "--global-batch", "10", "--repeats", "2", "--scale-model", "7b-cross-node",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / "run", done


def test_it_says_what_it_clipped_and_prints_a_row_per_strategy(run):
    _, done = run
    assert "cut to 1024 tokens" in done.stderr
    for name in ("packed:2", "static", "dcp"):
        assert any(line.startswith(name) for line in done.stdout.splitlines())


def test_losses_do_not_depend_on_the_strategy(run):
    strategies = load_summary(run[0])["strategies"]
    losses = [s["loss"] for s in strategies.values()]
    assert [len(x) for x in losses] == [2, 2, 2]
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], abs=1e-4)
    assert all(x[-1] < 5.6 for x in losses)  # ln 256 = 5.545: it is a real model


def test_the_summary_has_every_measure(run):
    summary = load_summary(run[0])
    assert summary["config"]["scale_model"] == "7b-cross-node"
    assert summary["config"]["clipped_samples"] > 1000
    for s in summary["strategies"].values():
        assert s["tokens_per_s"]["mean"] > 0
        assert 0 <= s["idle"] < 1
        assert 0 <= s["comm"] < 1
        assert s["predicted_s"]["mean"] > 0
    assert summary["strategies"]["packed:2"]["comm"] > summary["strategies"]["dcp"]["comm"] / 2


def test_plans_events_and_figures_are_there(run):
    folder = run[0]
    plans = sorted((folder / "plans").glob("*.json"))
    assert len(plans) == 6
    for path in plans:
        check_plan(load(path))
    events = read_events(folder)
    assert {e["rank"] for e in events} == {0, 1}
    assert {e["strategy"] for e in events} == {"packed:2", "static", "dcp"}
    assert {"placement", "wait", "reduce", "optimizer", "step"} <= {e["kind"] for e in events}
    assert (folder / "timeline.png").read_bytes()[:4] == b"\x89PNG"
    assert json.loads((folder / "cost.json").read_text())["schema"] == "mdcp.cost/1"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--strategies", "magic"], "unknown strategy 'magic'"),
        (["--max-length", "0"], "--max-length must be at least 1"),
        (["--scale-model", "7b-node", "--link-mbytes-per-s", "3"], "pass one"),
    ],
)
def test_bad_options_end_with_their_reason_and_write_nothing(tmp_path, options, text):
    done = subprocess.run(
        [sys.executable, "-m", "megatron_dcp", "train", "--out", "run", *options],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr[-2000:]
    assert text in done.stderr
    assert not (tmp_path / "run").exists()


def test_virtual_ranks(tmp_path):
    done = mdcp_train(tmp_path, "--suite", "virtual", "--out", ".", "--max-length", "512",
                      "--repeats", "1")  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    for ranks in (8, 32):
        summary = load_summary(tmp_path / f"quickstart-virtual{ranks}")
        assert summary["config"]["ranks"] == ranks
        assert set(summary["strategies"]) == {"packed", "static", "dcp"}
        for path in (tmp_path / f"quickstart-virtual{ranks}" / "plans").glob("*.json"):
            assert load(path).topology.data_ranks == ranks
