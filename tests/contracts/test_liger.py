"""Liger's fused loss: used only where it is right, and equal to the plain one.

The kernels run in Triton's interpreter on the CPU, in a process of their own; nightly, and only
where liger-kernel and triton are installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_dcp.adapters.hf.liger import contract_fault, liger_kernel, suits

ROOT = Path(__file__).parents[2]
EQUAL = """
import torch
from megatron_dcp.adapters.hf.liger import liger_kernel
from megatron_dcp.adapters.hf.loss import token_losses
kernel, why = liger_kernel()
assert kernel is not None, why
torch.manual_seed(0)
hidden, head = torch.randn(9, 16), torch.nn.Linear(16, 40)
labels, weights = torch.randint(0, 40, (9,)), torch.rand(9)
labels[2] = -100
found = []
for loss in (lambda h: kernel(h, head.weight, labels, head.bias),
             lambda h: token_losses(head(h), labels)):
    head.zero_grad()
    h = hidden.clone().requires_grad_()
    losses = loss(h)
    (losses * weights).sum().backward()
    found.append([losses.detach(), h.grad, head.weight.grad.clone(), head.bias.grad.clone()])
for a, b in zip(*found):
    torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6)
"""


@pytest.mark.nightly
@pytest.mark.skipif(util.find_spec("liger_kernel") is None, reason="liger_kernel is not installed")
@pytest.mark.skipif(util.find_spec("triton") is None, reason="triton is not installed")
def test_losses_and_gradients_per_token_equal_the_plain_ones() -> None:
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", EQUAL], env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]


def module(*arguments: str, inner: tuple[str, ...] = ("token_grad_output",)) -> SimpleNamespace:
    """A module of Liger's shape whose signatures have these names."""
    scope: dict[str, object] = {}
    exec(
        f"def forward(ctx, {', '.join(arguments)}): ...\ndef plain({', '.join(inner)}): ...", scope
    )
    return SimpleNamespace(
        LigerFusedLinearCrossEntropyFunction=SimpleNamespace(forward=scope["forward"]),
        fused_linear_cross_entropy_forward=scope["plain"],
    )


ARGUMENTS = ("_input", "weight", "target", "bias", "ce_weight", "ignore_index",
             "lse_square_scale", "label_smoothing", "reduction")  # fmt: skip


def test_only_a_kernel_with_gradients_per_token_is_used() -> None:
    assert contract_fault(module(*ARGUMENTS)) is None
    assert "token_grad_output" in (contract_fault(module(*ARGUMENTS, inner=("x",))) or "")
    assert "looked for arguments" in (contract_fault(module(*ARGUMENTS[1:])) or "")
    assert "looked for Liger" in (contract_fault(SimpleNamespace()) or "")


def test_a_missing_package_is_a_reason_and_no_error() -> None:
    kernel, why = liger_kernel()
    assert (kernel is None) == (why != "usable")


def test_it_stands_in_for_plain_heads_on_a_gpu_only() -> None:
    hidden = torch.zeros(1, 4)
    assert not suits(torch.nn.Linear(4, 4), hidden)
    assert not suits(torch.nn.Sequential(), SimpleNamespace(is_cuda=True))  # type: ignore[arg-type]
    assert suits(torch.nn.Linear(4, 4), SimpleNamespace(is_cuda=True))  # type: ignore[arg-type]
