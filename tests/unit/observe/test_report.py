"""Report, trace and figures from a run directory."""

import gzip
import html.parser
import json
import shutil
import subprocess

import pytest

from megatron_dcp.cli.main import main
from megatron_dcp.cli.report import simulate_steps
from megatron_dcp.errors import ConfigError
from megatron_dcp.observe.events import step_window
from megatron_dcp.observe.lanes import measured_bars
from megatron_dcp.observe.report import error_quantiles
from megatron_dcp.observe.run_dir import (
    clear_run,
    idle_by_rank,
    placement_times,
    planning_us,
    read_run,
)
from megatron_dcp.observe.trace import trace_events
from megatron_dcp.plan.groups import nccl_bytes


def test_reads_steps_in_order_and_tells_repeats_apart(run_dir):
    run = read_run(run_dir)
    assert run.strategies == ["packed:2", "dcp"]
    assert len(run.steps) == 2 * 2 * 3
    assert [s.step for s in run.steps_of("dcp")] == [0, 1, 2, 0, 1, 2]
    assert [s.occurrence for s in run.steps_of("dcp")] == [0, 0, 0, 1, 1, 1]
    assert all(s.plan is not None and s.plan.strategy == s.strategy for s in run.steps)
    assert all(len(s.of("step")) == 4 for s in run.steps)


def test_measured_placements_are_matched_with_their_plan(run_dir):
    for step in read_run(run_dir).steps:
        pairs = placement_times(step)
        assert len(pairs) == len(step.plan.placements)
        assert all(0.8 < predicted / measured < 1.25 for predicted, measured in pairs)
        assert planning_us(step) == (90, 10)
        assert all(0 <= share < 1 for share in idle_by_rank(step))


def test_steps_are_simulated_under_the_runs_profile(run_dir):
    run = read_run(run_dir)
    pairs = simulate_steps(run)
    assert {name: len(p) for name, p in pairs.items()} == {"packed:2": 6, "dcp": 6}
    for step, (simulated, measured) in zip(run.steps_of("dcp"), pairs["dcp"], strict=True):
        assert simulated == pytest.approx(step.plan.makespan_us / 1e3)
        assert measured == pytest.approx(simulated, rel=0.25)  # 5 % noise per rank and slot
    (run_dir / "cost.json").unlink()
    assert simulate_steps(run) == {}


def test_lanes_begin_with_the_step_although_it_was_planned_long_before(run_dir):
    step = read_run(run_dir).steps[3]
    ahead = {"rank": 0, "step": step.step, "kind": "plan", "start_us": 0, "end_us": 100}
    events = [*step.events, ahead]
    start, end = step_window(events)
    assert start == step.start_us
    bars = measured_bars(step.plan, events)
    assert min(b.start_us for b in bars) == 0
    assert max(b.end_us for b in bars) <= end - start
    with pytest.raises(ConfigError, match="no event"):
        step_window([ahead])


def test_error_quantiles():
    points = [(100.0, 100.0), (110.0, 100.0), (80.0, 100.0)]
    assert error_quantiles(points) == pytest.approx((0.1, 0.2))


def test_trace_events_nest_on_every_track(run_dir):
    events = trace_events(read_run(run_dir))
    tracks = {}
    for e in events:
        if e["ph"] == "X":
            assert e["ts"] >= 0
            assert e["dur"] >= 0
            tracks.setdefault((e["pid"], e["tid"]), []).append(e)
    assert set(tracks) >= {(r, t) for r in range(4) for t in (0, 1)}
    for group in tracks.values():
        open_ends = []
        for e in sorted(group, key=lambda e: (e["ts"], -e["dur"])):
            while open_ends and open_ends[-1] <= e["ts"]:
                open_ends.pop()
            assert not open_ends or e["ts"] + e["dur"] <= open_ends[-1]
            open_ends.append(e["ts"] + e["dur"])
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {"planned", "measured", "communication", "ahead"}


class _Resources(html.parser.HTMLParser):
    """Collects every address that the page's own tags would load."""

    def __init__(self):
        super().__init__()
        self.loaded = []

    def handle_starttag(self, tag, attrs):
        self.loaded += [v for k, v in attrs if k in ("src", "href") and tag != "a"]


def test_report_is_one_page_that_loads_nothing(run_dir, capsys):
    assert main(["report", str(run_dir), "--json"]) == 0
    files = json.loads(capsys.readouterr().out)["files"]
    page = (run_dir / "report" / "report.html").read_text()
    parser = _Resources()
    parser.feed(page)
    assert parser.loaded == []
    for title in ("Strategies", "Progress", "Data", "Idle time", "Prediction", "Simulation",
                  "Planner", "Communicators and memory", "Configuration"):  # fmt: skip
        assert f"<h2>{title}</h2>" in page
    assert "<td>102.0, 112.0, 122.0, 132.0</td>" in page, "of each rank, its largest step"
    assert page.count("<td>200</td>") == 2, "held peak MB of both strategies"
    assert f"<td>4 ({nccl_bytes(4) / 1e6:,.0f})</td>" in page, "groups of a rank and their memory"
    pngs = [f for f in files if f.endswith(".png")]
    assert len(pngs) == 3
    for file in pngs:
        with open(file, "rb") as f:
            body = f.read()
        assert body[:4] == b"\x89PNG"
        assert len(body) < 300_000
    trace = json.loads(gzip.decompress((run_dir / "report" / "trace.json.gz").read_bytes()))
    assert trace["traceEvents"]


@pytest.mark.skipif(
    shutil.which("chromium") is None, reason="chromium is not installed (apt-get install chromium)"
)
def test_report_draws_every_figure_in_a_browser(run_dir, tmp_path):
    assert main(["report", str(run_dir)]) == 0
    page = run_dir / "report" / "report.html"
    done = subprocess.run(
        ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=8000",
         f"--user-data-dir={tmp_path / 'browser'}", "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    wanted = page.read_text().count("<div class=figure>")
    assert wanted > 8
    assert done.stdout.count('class="main-svg"') >= wanted
    assert "Time of each placement" in done.stdout
    assert "Uncaught" not in done.stderr


def test_a_run_without_events_still_shows_its_plans(run_dir):
    for file in run_dir.glob("events-rank*.jsonl"):
        file.unlink()
    assert main(["report", str(run_dir)]) == 0
    page = (run_dir / "report" / "report.html").read_text()
    assert "<h2>Steps, as planned</h2>" in page
    assert "nothing measured per rank" in page
    assert not (run_dir / "report" / "trace.json.gz").exists()


def test_a_second_run_in_the_folder_leaves_nothing_of_the_first(run_dir):
    """Of four ranks; on two, their events alone are written over."""
    (run_dir / "notes.txt").write_text("mine")
    clear_run(run_dir, ranks=2)
    assert [p.name for p in sorted(run_dir.glob("events-*"))] == [
        "events-rank0.jsonl", "events-rank1.jsonl"
    ]  # fmt: skip
    assert not list((run_dir / "plans").iterdir())
    assert (run_dir / "notes.txt").exists()
    with pytest.raises(ConfigError, match="no summary"):
        read_run(run_dir)
    clear_run(run_dir / "new", ranks=1)  # nothing there


def test_wrong_directories_are_refused(tmp_path, run_dir, capsys):
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "not a directory" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 2
    assert "no summary.json" in capsys.readouterr().err
    assert main(["report", str(run_dir), "--out", str(run_dir / "cost.json")]) == 2
    assert "is not a folder" in capsys.readouterr().err
    (run_dir / "summary.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"mdcp\.run/1"):
        read_run(run_dir)


def _without(key):
    def damage(summary):
        del summary["strategies"]["dcp"][key]

    return damage


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda s: s.update(strategies={}), "no strategy in it"),
        (lambda s: s.update(strategies=["dcp"]), "no strategy in it"),
        (lambda s: s["strategies"].update(dcp=3), "strategies.dcp.tokens_per_s"),
        (lambda s: s["strategies"]["dcp"].update(step_s=2.0), "strategies.dcp.step_s"),
        (lambda s: s["strategies"]["dcp"].update(idle="much"), "strategies.dcp.idle"),
        (_without("comm"), "strategies.dcp.comm"),
    ],
)
def test_a_damaged_summary_is_refused_with_the_key(run_dir, capsys, damage, text):
    path = run_dir / "summary.json"
    summary = json.loads(path.read_text())
    damage(summary)
    path.write_text(json.dumps(summary))
    assert main(["report", str(run_dir)]) == 2
    err = capsys.readouterr().err
    assert text in err
    assert "Traceback" not in err


def test_damaged_files_of_a_run_end_without_a_traceback(run_dir, capsys):
    """A plan that was cut, a cost profile that is none, events of a rank that are gone."""
    (run_dir / "events-rank3.jsonl").unlink()
    assert main(["report", str(run_dir)]) == 0
    (run_dir / "cost.json").write_text("{}")
    assert main(["report", str(run_dir)]) == 2
    assert "cost.json" in capsys.readouterr().err
    (run_dir / "cost.json").unlink()
    plan = next((run_dir / "plans").glob("dcp-*.json"))
    plan.write_text(plan.read_text()[:200])
    assert main(["report", str(run_dir)]) == 1
    assert plan.name in capsys.readouterr().err
