"""Metric sinks: what is written is read back with the packages' own readers."""

import io

import pytest

from megatron_dcp.errors import ConfigError
from megatron_dcp.observe.run_dir import read_run
from megatron_dcp.observe.sinks import ConsoleSink, open_sinks, step_metrics


def test_metrics_of_a_measured_step(run_dir):
    step = read_run(run_dir).steps[0]
    m = step_metrics(step.plan, step.shares, loss=2.5)
    assert m["loss"] == 2.5
    assert m["time/predicted_ms"] == step.plan.makespan_us / 1e3
    error = m["time/predicted_ms"] / m["time/step_ms"] - 1
    assert m["time/prediction_error"] == pytest.approx(error)
    assert m["plan/planner_ms"] == 0.3
    assert 0 <= m["share/idle"] < 1


def test_console_prints_every_n_steps():
    out = io.StringIO()
    sink = ConsoleSink(every=2, file=out)
    sink.write(0, {"time/step_ms": 12.25})
    assert out.getvalue() == ""
    sink.write(1, {"time/step_ms": 13.5, "loss": 1.0})
    text = out.getvalue()
    assert "12.2" in text
    assert "1.0000" in text
    sink.close()
    assert out.getvalue() == text


def test_tensorboard_scalars_are_read_back(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (sink,) = open_sinks(["tensorboard"], tmp_path, {})
    for step in range(3):
        sink.write(step, {"share/idle": 0.1 * step})
    sink.close()
    reader = EventAccumulator(str(tmp_path / "tensorboard"))
    reader.Reload()
    values = [(e.step, float(e.tensor_proto.float_val[0])) for e in reader.Tensors("share/idle")]
    assert values == [(k, pytest.approx(0.1 * k, abs=1e-6)) for k in range(3)]


@pytest.mark.nightly
def test_wandb_writes_an_offline_run(tmp_path):
    pytest.importorskip("wandb", reason="wandb is not installed")
    (sink,) = open_sinks(["wandb"], tmp_path, {"hidden": 128})
    sink.write(0, {"loss": 1.0})
    sink.close()
    assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))


def test_unknown_sinks_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="tensorboard"):
        open_sinks(["mlflow"], tmp_path, {})
