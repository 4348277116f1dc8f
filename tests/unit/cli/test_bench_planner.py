"""`mdcp bench planner`: the rows, the bars and the exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_dcp.cli.bench_planner import gap_bar
from megatron_dcp.cli.main import main

LENGTHS = Path(__file__).parents[2] / "data" / "lengths"
QUICK = ["bench", "planner", "--lengths", str(LENGTHS), "--files", "wiki", "--sizes", "64/8",
         "--lockstep-sizes", "16/4", "--seeds", "2", "--repeats", "2"]  # fmt: skip


def test_rows_have_the_fixed_form(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--strategies", "static", "--strategies-size", "32/8", "--json"]
    assert main([*QUICK, *options]) == 0
    obj = json.loads(capsys.readouterr().out)
    assert obj["schema"] == "mdcp.bench/1"
    keys = {"case", "metric", "unit", "value", "baseline", "ratio", "bar", "ok"}
    assert all(set(row) == keys for row in obj["rows"])
    metrics = {(r["case"], r["metric"]): r for r in obj["rows"]}
    assert metrics["async wiki 64/8", "gap mean"]["bar"] == 1.5
    assert metrics["async wiki 64/8", "gap mean"]["value"] >= 0.0
    ratio = metrics["async wiki 32/8", "makespan dcp"]
    assert ratio["baseline"] == "static"
    assert 0.0 < ratio["ratio"] <= 1.0  # never slower than static


def test_a_missed_bar_fails_only_with_bars(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_dcp.cli.bench_planner.gap_bar", lambda *_: -1.0)
    quick = [*QUICK, "--strategies", ""]
    assert main(quick) == 0
    assert main([*quick, "--bars"]) == 1
    assert "FALLS SHORT" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "samples", "ranks", "bar"),
    [("wiki", 512, 64, 1.5), ("prolong", 512, 64, 1.0), ("heavy", 256, 64, 2.0),
     ("heavy", 128, 64, 4.0), ("wiki", 48, 64, 10.0), ("wiki", 8, 64, None)],
)  # fmt: skip
def test_bars_by_samples_per_rank(name: str, samples: int, ranks: int, bar: float | None) -> None:
    assert gap_bar(name, samples, ranks) == bar


def test_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 2
    assert main(["bench", "planer"]) == 2
    assert "unknown benchmark 'planer'" in capsys.readouterr().err
    assert main(["bench", "planner", "--seeds", "0"]) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--sizes", "64x8"], "size '64x8': use SAMPLES/RANKS"),
        (["--lockstep-sizes", "64/0"], "size '64/0'"),
        (["--strategies-size", "/8"], "size '/8'"),
        (["--strategies", "static,fastest"], "unknown strategy 'fastest'"),
        (["--files", "wiki,absent"], "absent_16384.txt: --lengths is the folder"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_does(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*QUICK, *options]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""
