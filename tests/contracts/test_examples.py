"""The examples run on two CPU ranks, and differ from their stock scripts by ten lines at most."""

from __future__ import annotations

import ast
import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dcp.testing.pool import free_port

pytest.importorskip("trl")
pytest.importorskip("deepspeed")

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def code_lines(path: Path) -> list[str]:
    """Lines of code of a script, normalised: no comments, no module docstring."""
    tree = ast.parse(path.read_text())
    if ast.get_docstring(tree) is not None:
        tree.body = tree.body[1:]
    return ast.unparse(tree).splitlines()


def changed_lines(stock: Path, planned: Path) -> list[str]:
    """Lines of the planned script that are not in the stock one."""
    diff = difflib.ndiff(code_lines(stock), code_lines(planned))
    return [line[2:] for line in diff if line.startswith("+ ") and line[2:].strip()]


@pytest.mark.parametrize("name", ["torch_minimal", "deepspeed_sft", "hf_sft"])
def test_integration_takes_ten_lines(name: str) -> None:
    lines = changed_lines(EXAMPLES / name / "stock.py", EXAMPLES / name / "train.py")
    assert 0 < len(lines) <= 10, "\n".join(lines)
    assert any("mdcp" in line or "megatron_dcp" in line for line in lines)


def test_the_minimal_example_is_small() -> None:
    text = (EXAMPLES / "torch_minimal" / "train.py").read_text()
    assert len(text.splitlines()) <= 120


@pytest.mark.parametrize(
    "arguments",
    [
        ["torch_minimal/train.py", "--steps", "4", "--max-length", "512"],
        ["deepspeed_sft/train.py", "--samples", "32", "--max-length", "512"],
        pytest.param(
            ["hf_sft/train.py", "--samples", "24", "--max-length", "512"],
            marks=pytest.mark.nightly,
        ),
        ["hf_sft/train.py", "--samples", "24", "--max-length", "512", "--lora"],
    ],
    ids=["torch", "deepspeed", "hf", "hf-lora"],
)
def test_examples_run_and_learn(arguments: list[str]) -> None:
    script, *rest = arguments
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    command += ["--master_port", str(free_port()), str(EXAMPLES / script), *rest]
    env = {
        **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu",
    }  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(x) for x in re.findall(r"'?loss'?:? '?([0-9.]+)", done.stdout)]
    assert len(losses) >= 3, done.stdout[-2000:]
    assert losses[-1] < losses[0]
