"""`mdcp train` as a user runs it: torchrun, two gloo ranks, real text; then what it left behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dcp.cli.main import main
from megatron_dcp.cli.report import simulate_steps
from megatron_dcp.cost import CostProfile, Link, ModelShape, digest, dumps
from megatron_dcp.cost.profile import Overhead
from megatron_dcp.observe.events import read_events
from megatron_dcp.observe.report import error_quantiles
from megatron_dcp.observe.run_dir import read_run
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
        assert s["exposed_ms"] >= 0
        if Path("/proc/self/clear_refs").exists():
            assert len(s["held_bytes"]) == 2
            assert min(s["held_bytes"]) > 10**8, "torch alone holds so much"
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
        (["--train-steps", "2", "--metrics", "mlflow"], "known are console, tensorboard, wandb"),
        (["--refit"], "belong to --train-steps"),
        (["--scale-model", "7b-node", "--link-mbytes-per-s", "3"], "pass one"),
    ],
)
def test_bad_options_end_with_their_reason_and_write_nothing(
    tmp_path, monkeypatch, capsys, options, text
):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--out", "run", *options]) == 2
    assert text in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, 4])
def test_simulated_steps_are_within_ten_percent_of_measured_ones(tmp_path, ranks):
    """The median over 50 steps; meaningful only where nothing else runs on the machine."""
    done = mdcp_train(
        tmp_path, "--out", "run", "--max-length", "2048", "--memory-tokens", "1200",
        "--global-batch", str(2 * ranks), "--repeats", "50", "--strategies", "dcp",
        "--scale-model", "7b-cross-node", ranks=ranks,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    (points,) = simulate_steps(read_run(tmp_path / "run")).values()
    assert len(points) == 50
    assert error_quantiles(points)[0] <= 0.10


def guessed_profile():
    """Of the reference GPT, far too slow, with room for 700 tokens: many placements a step."""
    return CostProfile(
        name="guess",
        model=ModelShape(layers=4, heads=4, kv_heads=2, head_dim=32, hidden=128, vocab=256,
                         element_bytes=4),
        linear_us_per_token=2000.0,
        attn_us_per_pair=1.0,
        overhead_us=Overhead(async_=9000.0),
        links=(Link(max_degree=2, us_per_byte=0.01, latency_us=50.0),),
        kept_bytes_per_token_layer=1000,
        checkpoint_bytes_per_token_layer=100,
        budget_bytes=4 * 1000 * 700,
    )  # fmt: skip


def test_a_long_run_shows_its_metrics_and_adopts_a_refit_at_a_checkpoint(tmp_path, capsys):
    (tmp_path / "guess.json").write_text(dumps(guessed_profile()))
    common = ["--metrics", "console,tensorboard", "--metrics-every", "4", "--refit", "--cost",
              "guess.json", "--max-length", "600", "--global-batch", "8", "--strategies", "static",
              "--checkpoint-every", "8", "--out", "run", "--fused", "auto"]  # fmt: skip
    first = mdcp_train(tmp_path, "--train-steps", "12", *common)
    assert first.returncode == 0, first.stderr[-4000:]
    assert first.stderr.count("tokens/s") == 3  # a table every four steps
    assert "--fused auto: torch's fused AdamW on cpu" in first.stderr
    assert "apex not used: rank 0: " in first.stderr
    run = tmp_path / "run"
    adopted = {p.stem.removeprefix("cost-") for p in run.glob("cost-*.json")}
    assert "step-00000008, from here on with run/cost-" in first.stderr
    digests = [load(p).cost.digest for p in sorted((run / "plans").glob("*.json"))]
    assert len(digests) == 12
    assert digests[:8] == [digest(guessed_profile())] * 8
    assert set(digests[8:]) <= adopted
    again = mdcp_train(tmp_path, "--train-steps", "14", "--resume", *common)
    assert again.returncode == 0, again.stderr[-4000:]
    assert "resumed after 12 steps" in again.stderr
    last = json.loads((run / "checkpoints/step-00000014/state.json").read_text())
    assert last["body"]["engine"]["cost"]["digest"] in {p.stem[5:] for p in run.glob("cost-*")}
    assert list((run / "tensorboard").iterdir())
    assert main(["report", str(run)]) == 0
    assert "2 steps of static" in capsys.readouterr().err


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
