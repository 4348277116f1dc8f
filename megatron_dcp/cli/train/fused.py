"""`mdcp train --fused auto`: fused optimizer and norms, as far as they run here.

Optimizer: FusedAdam of apex, else of Transformer Engine, else torch's own fused AdamW, else the
plain one. Norms: FusedRMSNorm of apex, else RMSNorm of Transformer Engine, else torch's. A package
is taken when its GPU kernels have GPU parameters to work on and `mdcp doctor`'s probe imports it,
on every rank: replicas that update with other kernels would part by rounding. Parameters keep their
names, so checkpoints do not depend on the choice.

The classes of both packages are read in tests/contracts/test_te_apex.py; they have not been run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megatron_dcp.cli.doctor.trainers import TRAINERS, probe
from megatron_dcp.dist import DataWorld, gather_bytes

Mode = Literal["auto", "off"]
WEIGHT_DECAY = 0.1

# package -> (module and class of its AdamW, of its RMSNorm)
CLASSES = {
    "apex": (("apex.optimizers", "FusedAdam"), ("apex.normalization", "FusedRMSNorm")),
    "transformer_engine": (
        ("transformer_engine.pytorch.optimizers", "FusedAdam"),
        ("transformer_engine.pytorch", "RMSNorm"),
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """What was chosen. package: of CLASSES, or None. torch_fused: AdamW(fused=True) runs here.

    lines: for people, what is used and why the rest is not.
    """

    package: str | None = None
    torch_fused: bool = False
    lines: tuple[str, ...] = ()

    def adamw(self, parameters: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
        """AdamW with this trainer's weight decay."""
        if self.package is not None:
            cls = _load(CLASSES[self.package][0])
            made: torch.optim.Optimizer = cls(
                parameters, lr=lr, weight_decay=WEIGHT_DECAY, adam_w_mode=True
            )
            return made
        fused = self.torch_fused or None
        return torch.optim.AdamW(parameters, lr=lr, weight_decay=WEIGHT_DECAY, fused=fused)

    def replace_norms(self, model: nn.Module) -> int:
        """Put the package's norm in place of every nn.RMSNorm, same weights; how many."""
        if self.package is None:
            return 0
        cls = _load(CLASSES[self.package][1])
        found = [(n, m) for n, m in model.named_modules() if type(m) is nn.RMSNorm]
        for name, norm in found:
            new = cls(norm.normalized_shape[0], eps=norm.eps)
            new.weight = norm.weight
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, new)
        return len(found)


def _load(where: tuple[str, str]) -> Callable[..., Any]:
    module, name = where
    loaded: Callable[..., Any] = getattr(import_module(module), name)
    return loaded


def find_fused(mode: Mode, device: torch.device) -> Fused:
    """What this run uses on parameters of `device`. Collective where there are several ranks."""
    if mode == "off":
        return Fused()
    faults = _agreed({name: _fault(name, device) for name in CLASSES})
    package = next((name for name, fault in faults.items() if fault is None), None)
    reason = _torch_fault(device)
    own = f"torch's fused AdamW on {device.type}" if reason is None else "torch's plain AdamW"
    used = f"{package}'s FusedAdam and RMSNorm" if package else f"{own}, torch's RMSNorm"
    lines = [f"--fused auto: {used}"]
    lines += [f"--fused auto: {name} not used: {text}" for name, text in faults.items() if text]
    if package is None and reason is not None:
        lines.append(f"--fused auto: torch's fused AdamW not used: {reason}")
    return Fused(package=package, torch_fused=reason is None, lines=tuple(lines))


def _fault(name: str, device: torch.device) -> str | None:
    """Why a package is not used, or None."""
    trainer = next(t for t in TRAINERS if t.name == name)
    gpu = device.type == "cuda"
    found = probe(trainer, quick=not gpu)  # without a GPU, whether it imports changes nothing
    if found["usable"] is False:
        return str(found["text"])
    return None if gpu else f"its kernels need a GPU, the parameters are on {device.type}"


def _agreed(faults: dict[str, str | None]) -> dict[str, str | None]:
    """The same on every rank: a fault of one is a fault of all."""
    world = DataWorld()
    try:
        everybody = [json.loads(x) for x in gather_bytes(world, json.dumps(faults).encode())]
    finally:
        world.close()
    return {
        name: next((f"rank {r}: {x[name]}" for r, x in enumerate(everybody) if x[name]), None)
        for name in faults
    }


def _torch_fault(device: torch.device) -> str | None:
    """Why AdamW(fused=True) does not run on a device, or None; tried on one number."""
    number = torch.zeros(1, device=device, requires_grad=True)
    number.grad = torch.ones_like(number)
    try:
        torch.optim.AdamW([number], fused=True).step()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None
