"""`mdcp simulate` from the command line: shapes of the output, exit codes, report, sweeps."""

import io
import json
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from megatron_dcp.cli.main import main
from megatron_dcp.cli.simulate.options import SimulateOptions
from megatron_dcp.cli.simulate.study import run_study

FAST = ["simulate", "--ranks", "16", "--batch", "48", "--steps", "2"]
VIDEO = ["--hardware", "h200", "--model", "dit-1.2b-2d", "--lengths", "preset:video-short"]


def run_json(capsys, *args):
    code = main([*FAST, "--json", *args])
    return code, json.loads(capsys.readouterr().out)


def test_json_is_one_object_of_the_documented_shape(capsys):
    code, obj = run_json(capsys, "--lengths", "preset:wiki", "--strategies", "static,dcp")
    assert code == 0
    assert obj["schema"] == "mdcp.simulate/1"
    assert obj["ranks"] == 16
    assert list(obj["strategies"]) == ["static", "dcp"]
    for row in obj["strategies"].values():
        assert set(row) == {
            "step_ms", "speedup_vs", "idle", "comm", "recompute", "padding", "planner_ms"
        }  # fmt: skip
        assert set(row["step_ms"]) == {"mean", "std"}
        assert set(row["speedup_vs"]) == {"bucket", "packed", "static"}
        assert 0 <= row["idle"] < 1
    assert obj["strategies"]["dcp"]["speedup_vs"]["static"] >= 1.0
    assert all(d["prediction_error"] < 1e-6 for d in obj["details"].values())


def test_equal_calls_give_equal_numbers(capsys):
    args = (*VIDEO, "--strategies", "dcp", "--noise-slot", "0.05", "--seeds", "2")
    _, first = run_json(capsys, *args)
    _, second = run_json(capsys, *args)
    for obj in (first, second):
        obj["strategies"]["dcp"].pop("planner_ms")
    assert first == second


def test_table_names_every_strategy_and_that_it_is_simulated(capsys):
    assert main([*FAST, *VIDEO, "--strategies", "bucket:4,dcp-inter,dcp"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("simulated:")
    for name in ("bucket:4", "dcp-inter", "dcp", "x bucket", "idle", "padding"):
        assert name in out


def test_a_comparison_ends_in_time_and_says_what_it_left_out(capsys):
    """flexsp's solver takes up to 10 s for one step: its rest is left out, others go on."""
    args = ["simulate", "--ranks", "16", "--batch", "48", "--steps", "50", "--seeds", "4",
            "--strategies", "flexsp,static,dcp"]  # fmt: skip
    begin = time.perf_counter()
    assert main([*args, *VIDEO, "--limit-s", "3"]) == 0
    assert time.perf_counter() - begin < 3 + 10 + 15  # one step of flexsp, start and baselines
    captured = capsys.readouterr()
    cut = {line.split(":")[0]: line for line in map(str.strip, captured.out.splitlines())
           if "of 200 steps (time limit; --limit-s 0 runs all)" in line}  # fmt: skip
    assert "flexsp" in cut
    assert "flexsp: stopped after" in captured.err


def test_a_time_limit_takes_steps_of_all_seeds_alike():
    options = SimulateOptions(ranks=8, batch=16, steps=3, seeds=2, plan_limit_s=0.0)
    study = run_study(options, ["static"], lambda _: None)
    assert set(study.tallies["static"].step_us) == {(0, 0)}
    whole = run_study(replace(options, plan_limit_s=None, limit_s=0.0), ["static"], lambda _: None)
    assert list(whole.tallies["static"].step_us) == [(s, k) for k in range(3) for s in range(2)]
    assert len(whole.lengths) == 3 * 16


def test_report_folder_with_sweeps(tmp_path, capsys):
    args = [*FAST, *VIDEO, "--strategies", "static,dcp", "--out", str(tmp_path / "sim"),
            "--sweep", "network,context"]  # fmt: skip
    assert main(args) == 0
    printed = capsys.readouterr().out.splitlines()
    (at,) = [i for i, line in enumerate(printed) if line.startswith("simulated sweep, network")]
    assert printed[at + 1].split() == ["network", "static", "dcp", "idle", "comm", "recomp."]
    value, static, ours = printed[at + 2].split()[:3]
    assert (value, static) == ("50", "1.00x")
    assert float(ours.removesuffix("x")) >= 1.0
    page = (tmp_path / "sim" / "index.html").read_text()
    for text in ("Simulated comparison", "Sweep: network", "Sweep: context", "Degree by sample"):
        assert text in page
    names = {p.name for p in (tmp_path / "sim").iterdir()}
    assert {"index.html", "simulate.json", "plans", "step_times.png", "sweep_network.png"} <= names
    assert json.loads((tmp_path / "sim" / "simulate.json").read_text())["ranks"] == 16


def test_checkpointing_everything_costs_about_a_third(capsys):
    args = (*VIDEO, "--strategies", "static")
    _, free = run_json(capsys, *args)
    _, always = run_json(capsys, *args, "--recompute", "always")
    ratio = [o["strategies"]["static"]["step_ms"]["mean"] for o in (always, free)]
    assert 1.2 < ratio[0] / ratio[1] < 1.4


def test_length_files_and_context_limit(tmp_path, capsys):
    file = tmp_path / "lengths.txt"
    file.write_text("\n".join(["100", "50000", "700"] * 20))
    args = ("--lengths", str(file), "--strategies", "dcp")
    _, whole = run_json(capsys, *args)
    _, cut = run_json(capsys, *args, "--context", "1000")
    mean = [o["strategies"]["dcp"]["step_ms"]["mean"] for o in (cut, whole)]
    assert mean[0] < mean[1] / 5


def test_stdin_serves_every_seed_and_point_of_a_sweep(capsys, monkeypatch):
    text = "\n".join(str(n) for n in range(100, 200))
    args = ("--lengths", "-", "--strategies", "dcp", "--seeds", "2")
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    _, short = run_json(capsys, *args)
    assert short["details"]["dcp"]["steps"] == 4
    monkeypatch.setattr("sys.stdin", io.StringIO(text + "000\n"))
    assert main([*FAST, *args, "--sweep", "context"]) == 0  # its own stdin, not the one before
    rows = capsys.readouterr().out.partition("simulated sweep")[2].splitlines()[2:]
    assert len(rows) == 6
    assert all("x" in row for row in rows), rows


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--strategies", "fastest"], "unknown strategy"),
        (["--lengths", "preset:books"], "known presets"),
        (["--hardware", "h200"], "go together"),
        (["--sweep", "colour"], "known axes"),
        (["--sweep", "memory"], "pass --hardware"),
        (["--sweep", "model"], "pass --hardware and --model"),
        (["--steps", "0"], ">= 1"),
        (["--context", "-5"], ">= 1"),
        (["--memory-gb", "nan"], "memory of nan GB"),
        (["--hardware", "h200", "--model", "gpt-7b", "--memory-gb", "inf"], "memory of inf GB"),
        (["--hardware", "h200", "--model", "gpt-7b", "--network-gbit-per-s", "0"], "above 0"),
        (["--noise-slot", "nan"], "sigmas"),
        (["--limit-s", "nan"], "--limit-s is nan"),
        (["--out", __file__], "is not a folder"),
    ],
)
def test_bad_usage_exits_2_with_the_reason(args, words, capsys):
    assert main([*FAST, *args]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""


def test_simulating_and_reporting_import_no_torch(tmp_path):
    code = (
        "import sys\n"
        "from megatron_dcp.cli.main import main\n"
        f"assert main({[*FAST, *VIDEO, '--strategies', 'dcp', '--out', str(tmp_path)]!r}) == 0\n"
        "import megatron_dcp.cli.report, megatron_dcp.observe.report, megatron_dcp.observe.sinks\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_shape_quantum_gives_fewer_shapes_for_more_padding(capsys):
    args = ("--lengths", "preset:wiki", "--strategies", "dcp")
    _, free = run_json(capsys, *args)
    _, padded = run_json(capsys, *args, "--shape-quantum", "256")
    before, after = free["details"]["dcp"], padded["details"]["dcp"]
    assert after["shapes"] < before["shapes"]
    assert padded["strategies"]["dcp"]["padding"] > free["strategies"]["dcp"]["padding"]
    # Only real tokens count as throughput.
    assert after["tokens_per_s_per_rank"] < before["tokens_per_s_per_rank"]


def test_a_shape_quantum_is_refused_for_video(capsys):
    assert main([*FAST, *VIDEO, "--strategies", "dcp", "--shape-quantum", "64"]) == 2
    assert "cannot be padded" in capsys.readouterr().err
