"""The examples run on two CPU ranks, and differ from their stock scripts by ten lines at most.

Megatron-LM's own scripts change by no line (`mdcp launch`, test_megatron_training.py); counted here
is a loop of one's own on megatron-core.
"""

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
pytest.importorskip("megatron.core")

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


@pytest.mark.parametrize(
    ("stock", "planned"),
    [
        ("torch_minimal/stock.py", "torch_minimal/train.py"),
        ("deepspeed_sft/stock.py", "deepspeed_sft/train.py"),
        ("hf_sft/stock.py", "hf_sft/train.py"),
        ("accelerate_sft/stock.py", "accelerate_sft/train.py"),
        ("megatron_gpt/stock_loop.py", "megatron_gpt/core_loop.py"),
    ],
)
def test_integration_takes_ten_lines(stock: str, planned: str) -> None:
    lines = changed_lines(EXAMPLES / stock, EXAMPLES / planned)
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
        ["hf_sft/train.py", "--samples", "24", "--max-length", "512"],
        ["hf_sft/train.py", "--samples", "24", "--max-length", "512", "--lora"],
        ["accelerate_sft/train.py", "--samples", "36", "--max-length", "512"],
    ],
    ids=["torch", "deepspeed", "hf", "hf-lora", "accelerate"],
)
def test_examples_run_and_learn(arguments: list[str]) -> None:
    losses = losses_of(arguments)
    assert losses[-1] < losses[0]


def test_a_loop_on_megatron_core_logs_the_losses_of_its_stock_script() -> None:
    """Random tokens: there is nothing to learn, and the same samples give the same losses."""
    planned = losses_of(["megatron_gpt/core_loop.py"])
    stock = losses_of(["megatron_gpt/stock_loop.py"])
    assert planned == pytest.approx(stock, abs=1.01e-4)  # four digits are printed


def losses_of(arguments: list[str]) -> list[float]:
    """Losses that an example prints, on two ranks."""
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
    return losses
