"""The convergence runs, small: same samples, three strategies, losses equal; and their report."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_dcp.errors import ConfigError

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from convergence.report import OTHERS, difference, losses, read_runs, summarise
from convergence.run import STRATEGIES, Variant, schedule_weighted
from convergence.tasks import MANUAL, manual_pages

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "benchmarks" / "convergence"
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
pytestmark = pytest.mark.timeout(600)  # several processes, on machines that may be busy
HAS_PAGES = any(MANUAL.glob("man[2-8]/*.gz"))


def run(out: Path, *options: str, timeout: float = 290) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", "2", str(SCRIPTS / "run.py"), "--out", str(out), *options]
    done = subprocess.run(
        command, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("convergence")
    tasks = ["gpt-stdlib", "dit-clips", *(["gpt-man"] if HAS_PAGES else [])]
    run(out, "--tasks", ",".join(tasks), "--dtypes", "float64", "--steps", "5")
    run(out, "--tasks", "dit-clips", "--dtypes", "float32", "--steps", "6", "--schedule-weights")
    return read_runs(out)


@pytest.mark.parametrize("task", ["gpt-stdlib", "gpt-man", "dit-clips"])
def test_losses_of_the_strategies_are_equal_in_float64(runs: Any, task: str) -> None:
    if task == "gpt-man" and not HAS_PAGES:
        pytest.skip("no manual pages on this system (Debian: manpages-dev)")
    static = losses(runs, task=task, dtype="float64", strategy="static")
    assert len(set(static)) == len(static) == 5
    for strategy in OTHERS:
        assert difference(runs, task, "float64", strategy).max() <= 1e-9


def test_the_plans_really_differ(runs: Any) -> None:
    plans = {
        s: [
            p["digest"]
            for task in ("gpt-stdlib", "dit-clips")
            for p in runs[Variant(task=task, dtype="float64", strategy=s)]["plans"]
        ]
        for s in STRATEGIES
    }
    for a in STRATEGIES:
        for b in STRATEGIES:
            assert a == b or plans[a] != plans[b], (a, b)


def test_float32_differs_no_more_than_by_reversing_the_samples(runs: Any) -> None:
    change = difference(runs, "dit-clips", "float32", "static", reverse=True)
    found = max(difference(runs, "dit-clips", "float32", s).max() for s in OTHERS)
    assert 0 < change.max() < 1e-4
    assert found <= 10 * change.max()


def test_weights_that_depend_on_the_schedule_change_what_is_learnt(runs: Any) -> None:
    """The option that shows the original's weights: same first loss, then another curve."""
    exact = losses(runs, task="dit-clips", dtype="float32", strategy="static")
    curves = [
        losses(runs, task="dit-clips", dtype="float32", strategy=s, schedule_weights=True)
        for s in STRATEGIES
    ]
    for curve in curves:
        assert curve[0] == pytest.approx(exact[0], abs=1e-5)
        assert np.abs(curve - exact).max() > 1e-4
    assert np.abs(curves[0] - curves[2]).max() > 1e-4


def test_no_manual_pages_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no manual pages below"):
        manual_pages(tmp_path)


def test_the_original_weighs_a_token_by_its_microbatch() -> None:
    """Two microbatches of 1 and 3 tokens on one of two ranks: weights 1/4 and 1/12 of the sum."""
    from types import SimpleNamespace

    import torch

    def microbatch(tokens: int) -> Any:
        return SimpleNamespace(weights=torch.ones(tokens), labels=torch.zeros(tokens), dummy=False)

    small, large = microbatch(1), microbatch(3)
    step = SimpleNamespace(denominator=8.0, microbatches=[small, large])
    one = torch.ones(())
    assert float(schedule_weighted(small, one, step, 2)) / 8 == pytest.approx(1 / 4)
    assert float(schedule_weighted(large, one, step, 2)) / 8 == pytest.approx(1 / 12)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("task", ["dit-clips", "gpt-man", "gpt-stdlib"])
def test_two_hundred_steps_keep_every_bar(tmp_path: Path, task: str) -> None:
    if task == "gpt-man" and not HAS_PAGES:
        pytest.skip("no manual pages on this system (Debian: manpages-dev)")
    run(tmp_path, "--tasks", task, "--schedule-weights", timeout=1700)
    assert summarise(read_runs(tmp_path), task).missed == []
    report = [sys.executable, str(SCRIPTS / "report.py"), "--runs", str(tmp_path)]
    done = subprocess.run(
        [*report, "--figures", str(tmp_path)], cwd=ROOT, env=ENV, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "missed: none" in done.stdout
    for name in ("convergence", "convergence_schedule_weights"):
        figure = (tmp_path / f"{name}.png").read_bytes()
        assert figure[:4] == b"\x89PNG"
        assert len(figure) < 300_000
