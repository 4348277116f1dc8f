"""Means, spreads, interleaved ratios and the written file."""

import json

import pytest

from megatron_dcp.errors import ConfigError
from megatron_dcp.observe.summary import (
    RunSummary,
    StepRecord,
    load_summary,
    table_cells,
    table_lines,
)


def record(repeat, step_s, **more):
    return StepRecord(**{"repeat": repeat, "tokens": 100, "step_s": step_s, "predicted_s": 1.0,
                         "idle": 0.1, "comm": 0.2, "loss": 3.0 - repeat, **more})  # fmt: skip


def summary():
    run = RunSummary(what="test", config={"ranks": 2})
    for repeat, drift in enumerate((1.0, 3.0)):
        run.add("packed:2", record(repeat, 2.0 * drift))
        run.add("dcp", record(repeat, 1.0 * drift))
    return run


def test_ratios_are_taken_inside_a_repeat():
    got = summary().to_object()["strategies"]["dcp"]
    assert got["speedup_vs"]["packed:2"] == {"mean": 2.0, "std": 0.0}
    assert got["tokens_per_s"]["mean"] == pytest.approx((100 + 100 / 3) / 2)
    assert got["loss"] == [3.0, 2.0]
    assert got["prediction_error"] == pytest.approx((0 + 2 / 3) / 2)
    assert got["prediction_error_of_mean"] == pytest.approx(0.5)


def test_memory_is_the_largest_step_of_each_rank():
    run = RunSummary(what="test", config={})
    for held in ((5, 9), (7, 8), ()):
        run.add("dcp", record(0, 1.0, held=held))
    run.add("static", record(0, 1.0))
    obj = run.to_object()
    assert obj["strategies"]["dcp"]["held_bytes"] == [7, 9]
    assert "held_bytes" not in obj["strategies"]["static"]
    head, *rows = table_cells(obj, [])
    at = head.index("held MB")
    assert [row[at] for row in rows] == ["0", "-"]


def test_written_and_read(tmp_path):
    path = summary().write(tmp_path / "run")
    obj = load_summary(tmp_path / "run")
    assert obj["schema"] == "mdcp.run/1"
    assert json.loads(path.read_text()) == obj
    assert [p.name for p in path.parent.iterdir()] == ["summary.json"]
    lines = table_lines(obj)
    assert len({len(line) for line in lines}) == 1
    assert "2.00 ± 0.00x" in lines[2]


def test_another_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no summary\.json"):
        load_summary(tmp_path)
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot read"):
        load_summary(tmp_path)
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"not a mdcp\.run/1"):
        load_summary(tmp_path)
