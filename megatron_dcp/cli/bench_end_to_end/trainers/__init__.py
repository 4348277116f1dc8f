"""The trainers of the benchmark, one module each behind one interface."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from megatron_dcp.cli.train.stack import Linked, Stack
from megatron_dcp.data.stdlib import TextCorpus
from megatron_dcp.dist import DataWorld
from megatron_dcp.runtime.contender import Contender


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a trainer's model is made from. model, device: see the options of the same names."""

    max_length: int
    seed: int
    model: str
    device: str
    say: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What all contenders of one comparison share: equal data, batches, seed, profile and link."""

    world: DataWorld
    corpus: TextCorpus
    linked: Linked
    global_batch: int
    seed: int
    lr: float


class Trainer(Protocol):
    """One trainer. strategies: what it is compared under by default, `dcp` and its own best static
    settings. package: what is trained with, and its version."""

    strategies: Sequence[str]
    package: str

    def stack(self) -> Stack:
        """Its model, for calibration."""
        ...

    def contender(self, strategy: str, job: Job) -> Contender:
        """The trainer under one strategy, with its own copy of the model. Collective."""
        ...


def open_trainer(name: str, settings: Settings) -> Trainer:
    """The trainer of `--trainer NAME`. Raises AdapterError where its package is missing."""
    module = import_module(f"megatron_dcp.cli.bench_end_to_end.trainers.{name}")
    trainer: Trainer = module.open(settings)
    return trainer
