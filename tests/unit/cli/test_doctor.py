"""`mdcp doctor`: reports what is there and why the rest is not, whatever is missing."""

import json
import subprocess
import sys

import pytest

from megatron_dcp.cli.doctor import examine
from megatron_dcp.cli.doctor.communicators import block_sizes, estimate
from megatron_dcp.cli.doctor.trainers import TRAINERS, probe, run_python
from megatron_dcp.cli.main import main
from megatron_dcp.dist import DataWorld
from megatron_dcp.errors import ConfigError

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # every import of it raises ImportError
from megatron_dcp.cli.main import main
raise SystemExit(main(sys.argv[1:]))
"""


def named(name):
    return next(t for t in TRAINERS if t.name == name)


def test_json_is_one_object_with_every_part():
    done = subprocess.run(
        [sys.executable, "-m", "megatron_dcp", "doctor", "--quick", "--json", "--ranks", "16"],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert found["schema"] == "mdcp.doctor/1"
    assert found["torch"]["usable"]
    assert found["planner"]["usable"]
    assert set(found["ops"]["cpu_paths"]) == {"float64", "float32", "bfloat16", "float16"}
    assert {t["name"] for t in found["trainers"]} == {t.name for t in TRAINERS}
    assert found["communicators"]["ranks_per_node"] == 8


def test_without_torch_it_says_so_and_exits_with_0():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, "doctor", "--quick", "--json"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert not found["torch"]["usable"]
    assert "work without it" in found["torch"]["text"]
    assert not found["ops"]["usable"]
    assert "pip install" in found["ops"]["text"] or "Install" in found["ops"]["text"]
    assert "torch cannot be imported" in found["gpus"]["reason"]
    assert found["planner"]["usable"]


def test_the_unrelated_apex_is_told_from_nvidias(tmp_path, monkeypatch):
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("raise RuntimeError('must not be imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = probe(named("apex"), quick=False)
    assert found["usable"] is False
    assert "is not NVIDIA's apex" in found["text"]


def test_a_package_that_fails_to_import_gives_its_reason(tmp_path, monkeypatch):
    package = tmp_path / "flash_attn"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('undefined symbol: _ZN3foo')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = probe(named("flash_attn"), quick=False)
    assert found["usable"] is False
    assert "undefined symbol: _ZN3foo" in found["text"]
    assert probe(named("flash_attn"), quick=True)["usable"] is None


def test_a_crash_of_an_import_is_reported():
    reason, _ = run_python("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert reason == "ended by signal 11"


def test_trainers_that_are_missing_say_how_to_get_them():
    for trainer in examine(quick=True)["trainers"]:
        assert trainer["text"]
        if trainer["usable"] is False:
            assert "install" in trainer["text"]


def count_by_hand(ranks, node):
    """Every aligned block inside a node, as a set."""
    blocks = {(first, d) for d in block_sizes(node) for first in range(0, ranks, d)
              if first % node + d <= node}  # fmt: skip
    return len(blocks) + 1


@pytest.mark.parametrize(("ranks", "node"), [(2, 2), (8, 8), (64, 8), (16, 4)])
def test_communicators_are_counted(ranks, node):
    found = estimate(ranks, node)
    assert found["in_job_at_most"] == count_by_hand(ranks, node)
    assert found["per_rank_at_most"] == 1 + len(block_sizes(node))


def test_one_rank_makes_none_as_in_the_runtime():
    assert estimate(1, 1)["in_job_at_most"] == DataWorld().communicators == 0


def test_ranks_that_do_not_fill_nodes_are_refused():
    with pytest.raises(ConfigError, match="not a multiple"):
        estimate(12, 8)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ranks", "0"], "both must be >= 1"),
        (["--ranks", "8", "--ranks-per-node", "0"], "both must be >= 1"),
        (["--ranks-per-node", "8"], "pass that too"),
    ],
)
def test_bad_counts_are_refused_before_trainers_are_looked_up(options, words, monkeypatch, capsys):
    monkeypatch.setattr("megatron_dcp.cli.doctor.probe_all", lambda **_: pytest.fail("too late"))
    assert main(["doctor", *options]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""
