"""`mdcp train --fused auto`: what is used, and the reason for what is not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from megatron_dcp.cli.train import fused
from megatron_dcp.cli.train.fused import Fused, find_fused
from megatron_dcp.cli.train.model import Gpt, GptConfig

CPU = torch.device("cpu")
# What is called of NVIDIA's apex, which is on no index: its own classes need a GPU.
APEX = {
    "normalization": "from torch.nn import RMSNorm\nclass FusedRMSNorm(RMSNorm): pass\n",
    "optimizers": (
        "from torch.optim import AdamW\n"
        "class FusedAdam(AdamW):\n"
        "    def __init__(self, params, lr, weight_decay, adam_w_mode):\n"
        "        assert adam_w_mode\n"
        "        super().__init__(params, lr=lr, weight_decay=weight_decay)\n"
    ),
}


@pytest.fixture
def apex(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package of NVIDIA's layout on the module path, and out of the process afterwards."""
    for name, text in APEX.items():
        (tmp_path / "apex" / name).mkdir(parents=True)
        (tmp_path / "apex" / name / "__init__.py").write_text(text)
    (tmp_path / "apex" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [m for m in sys.modules if m.partition(".")[0] == "apex"]:
        del sys.modules[name]


def small() -> Gpt:
    torch.manual_seed(0)
    return Gpt(GptConfig(hidden=16, layers=2, heads=2, kv_heads=1, ffn=32))


def update(model: nn.Module, chosen: Fused) -> list[torch.Tensor]:
    optimizer = chosen.adamw(model.parameters(), 1e-2)
    for _ in range(2):
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.5) * p.detach().sign()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def test_off_is_the_plain_optimizer() -> None:
    chosen = find_fused("off", CPU)
    assert (chosen.package, chosen.torch_fused, chosen.lines) == (None, False, ())
    assert not chosen.adamw([torch.zeros(1, requires_grad=True)], 1e-3).defaults["fused"]


def test_on_a_cpu_torchs_fused_adamw_is_taken_and_the_reasons_are_said() -> None:
    chosen = find_fused("auto", CPU)
    text = "\n".join(chosen.lines)
    assert "torch's fused AdamW on cpu, torch's RMSNorm" in text
    assert "apex not used: rank 0: not installed; build github.com/NVIDIA/apex" in text
    assert "transformer_engine not used: rank 0: not installed" in text
    assert chosen.adamw([torch.zeros(1, requires_grad=True)], 1e-3).defaults["fused"] is True
    for ours, plain in zip(update(small(), chosen), update(small(), Fused()), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-8)


def test_a_device_without_a_fused_adamw_gets_the_plain_one() -> None:
    chosen = find_fused("auto", torch.device("meta"))
    assert "torch's plain AdamW, torch's RMSNorm" in chosen.lines[0]
    assert "torch's fused AdamW not used: " in chosen.lines[-1]
    assert not chosen.adamw([torch.zeros(1, requires_grad=True)], 1e-3).defaults["fused"]


@pytest.mark.usefixtures("apex")
def test_an_installed_package_needs_a_gpu() -> None:
    text = "\n".join(find_fused("auto", CPU).lines)
    assert "apex not used: rank 0: its kernels need a GPU, the parameters are on cpu" in text


@pytest.mark.usefixtures("apex")
def test_a_usable_package_gives_the_optimizer_and_every_norm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fused, "_fault", lambda name, device: None if name == "apex" else "no")
    chosen, model, plain = find_fused("auto", CPU), small(), small()
    assert chosen.lines[0] == "--fused auto: apex's FusedAdam and RMSNorm"
    assert chosen.replace_norms(model) == 5
    assert not [m for m in model.modules() if type(m) is nn.RMSNorm]
    assert list(model.state_dict()) == list(plain.state_dict())
    ids, positions = torch.arange(6), torch.arange(6)
    hidden, wanted = model.norm(model.embedding(ids)), plain.norm(plain.embedding(positions))
    assert torch.equal(hidden, wanted)
    for ours, theirs in zip(update(model, chosen), update(plain, Fused()), strict=True):
        assert torch.equal(ours, theirs)
