"""CPU stand-ins: what Megatron needs of `torch.cuda` to train on a machine without a GPU.

Used for tests, examples and laptops; `install` refuses where a GPU is present. Megatron names the
device "cuda" in about two hundred places and asks for streams, events, generators and counters
that CPU builds of torch lack. Each StandIn says what it serves; removing one makes the named call
sites fail (tests/contracts/test_megatron_standins.py). With gloo as backend nothing else is needed:
it has every collective.

Three groups: `gaps` of the wheels, `core` (megatron-core builds, trains and clips), `training`
(`megatron.training.pretrain`). The device mode costs about 3 us per torch call.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from megatron_dcp.adapters.megatron.standins.core import CORE
from megatron_dcp.adapters.megatron.standins.gaps import GAPS
from megatron_dcp.adapters.megatron.standins.pieces import Setter, StandIn
from megatron_dcp.adapters.megatron.standins.training import TRAINING
from megatron_dcp.errors import AdapterError

PIECES: tuple[StandIn, ...] = (*GAPS, *CORE, *TRAINING)


@dataclass(slots=True)
class Installed:
    """Stand-ins in force; `undo` takes them out again."""

    names: tuple[str, ...]
    _setters: list[Setter]

    def undo(self) -> None:
        while self._setters:
            self._setters.pop().undo()


_installed: Installed | None = None


def gpu_present() -> bool:
    """Whether a real GPU is there, also after `install`."""
    return _installed is None and torch.cuda.is_available()


def install(*, training: bool = True, leave_out: tuple[str, ...] = ()) -> Installed:
    """Install the pieces, once per process. Raises AdapterError where a GPU is present.

    leave_out: pieces to skip; the tests use it to show that each one is necessary.
    """
    global _installed
    if _installed is not None:
        return _installed
    if torch.cuda.is_available():
        raise AdapterError(
            "CPU stand-ins were asked for and a GPU was found: they would hide it. "
            "Start without them (they are chosen only where torch.cuda.is_available() is False)"
        )
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # read by torch at its first compile
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # asserted by Megatron
    setters, names = [], []
    for piece in PIECES if training else (*GAPS, *CORE):
        if piece.name in leave_out:
            continue
        setter = Setter()
        piece.install(setter)
        setters.append(setter)
        names.append(piece.name)
    _installed = Installed(names=tuple(names), _setters=setters)
    return _installed


def remove() -> None:
    """Take the stand-ins out again."""
    global _installed
    if _installed is not None:
        _installed.undo()
        _installed = None
