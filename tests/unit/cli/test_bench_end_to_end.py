"""Goals and data sets of `mdcp bench end-to-end`, without running it."""

import numpy as np
import pytest
import torch

from megatron_dcp.cli.bench_end_to_end.goals import rows
from megatron_dcp.cli.bench_end_to_end.options import EndToEndOptions
from megatron_dcp.cli.bench_end_to_end.sets import sample_set
from megatron_dcp.cli.bench_end_to_end.suite import Run
from megatron_dcp.cli.main import main
from megatron_dcp.errors import ConfigError
from megatron_dcp.observe.summary import RunSummary, StepRecord


def finished(setting, seconds):
    """A run in which each strategy took the given seconds in its repeats."""
    summary = RunSummary(what="test", config={})
    for name, times in seconds.items():
        for repeat, s in enumerate(times):
            summary.add(name, StepRecord(repeat=repeat, tokens=100, step_s=s, predicted_s=1.0,
                                         idle=0.1, comm=0.2, planner_ms=3.0))  # fmt: skip
    return Run(setting=setting, data="stdlib", folder=f"{setting}-stdlib", summary=summary)


def judged(run):
    return {r.baseline: (r.ratio, r.bar, r.ok) for r in rows([run]) if r.bar is not None}


def test_cross_node_goals_name_the_best_published_strategy():
    run = finished("7b-cross-node", {"dcp": [1.0], "packed:2": [1.3], "static": [1.05],
                                     "megatron": [1.2], "flexsp:2": [1.1]})  # fmt: skip
    assert judged(run) == {
        "packed:2": (1.3, 1.2, True),
        "static": (1.05, 1.08, False),
        "flexsp:2": (1.1, 1.0, True),
    }


def test_unpaced_may_be_slower_by_the_spread_of_the_ratio_alone():
    run = finished("unpaced", {"dcp": [1.0, 1.0], "static": [0.9, 1.06], "bucket": [0.9, 0.9]})
    found = judged(run)
    assert found["static"] == (0.98, pytest.approx(1 - 0.16 / 2**0.5, abs=1e-3), True)
    assert found["bucket"] == (0.9, 1.0, False)


def test_a_failed_strategy_has_no_row_and_spoils_no_other():
    run = finished("virtual32", {"dcp": [1.0], "packed": [2.0], "megatron": [1.0]})
    run.summary.failed["megatron"] = "sample 3 does not fit"
    found = list(rows([run]))
    assert judged(run) == {"packed": (2.0, 1.5, True)}
    assert not any("megatron" in r.case for r in found)
    assert next(r.value for r in found if r.metric == "planner") == 3.0


@pytest.mark.parametrize("name", ["stdlib", "heavy", "video-balanced"])
def test_sets_have_the_longest_sample_asked_for_and_a_long_tail(name):
    data = sample_set(name, max_length=8192, seed=0)
    lengths = np.array(data.corpus.lengths)
    assert lengths.min() >= 1
    assert lengths.max() == 8192
    top = np.sort(lengths)[-len(lengths) // 20 :]
    assert top.sum() > 0.3 * lengths.sum()  # 5 % of the samples
    again = sample_set(name, max_length=8192, seed=0)
    assert again.corpus.samples == data.corpus.samples


def test_quick_is_smaller_and_keeps_what_was_asked():
    options = EndToEndOptions(quick=True, sets="heavy", virtual_ranks="8").sized()
    assert options.max_length < 8192
    assert options.set_names == ["heavy"]
    assert options.clusters == [8]
    assert options.budget_tokens("7b-node") == 256
    assert options.budget_tokens("7b-cross-node-no-budget") is None
    assert options.budget_tokens("unpaced") is None
    with pytest.raises(ConfigError, match="at least 1"):
        EndToEndOptions(repeats=0)


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ({"device": "tpu"}, "use cpu or cuda"), ({"hardware": "h999"}, "unknown hardware 'h999'"),
        ({"model": "gpt-9t"}, "unknown model 'gpt-9t'"), ({"lr": float("nan")}, "--lr is nan"),
        ({"seed": -1}, "--seed is -1"), ({"sets": "poems"}, "--sets 'poems'"),
    ],
)  # fmt: skip
def test_bad_options_are_refused_before_ranks_are_started(option, text):
    with pytest.raises(ConfigError, match=text):
        EndToEndOptions(**option)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_gpus_that_are_not_there_are_named_before_ranks_are_started(tmp_path, capsys):
    args = ["bench", "end-to-end", "--device", "cuda", "--out", str(tmp_path / "out")]
    assert main(args) == 2
    assert "2 ranks on this machine, torch finds 0 CUDA devices" in capsys.readouterr().err
