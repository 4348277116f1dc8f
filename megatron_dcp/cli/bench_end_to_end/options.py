"""Options of `mdcp bench end-to-end`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from megatron_dcp.cost.hardware import hardware as hardware_preset
from megatron_dcp.cost.models import model as model_preset
from megatron_dcp.errors import ConfigError

TrainerName = Literal["native", "torch", "deepspeed", "hf", "megatron"]
NO_BUDGET = "-no-budget"
SETS = ("stdlib", "heavy", "video-balanced")
# Setting -> scale model of `mdcp train`; `-no-budget` after a name lifts the memory budget.
SETTINGS = {
    "unpaced": "none",
    "7b-node": "7b-node",
    "7b-cross-node": "7b-cross-node",
    "network": "none",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EndToEndOptions:
    """Train the same samples under every strategy, in one run, and compare.

    Ranks are processes of this machine, one thread and one core each. Repeats are interleaved
    (A B C A B C). Virtual ranks: every microbatch of a larger plan is run on one core with its real
    shapes, and links are modelled.
    """

    trainer: TrainerName = "native"
    """Whose training loop runs: the reference trainer's or a real package's."""

    ranks: int = 2
    """Processes; 1 replays virtual ranks alone. Under a launcher: how many it started."""

    sets: str = "stdlib,heavy,video-balanced"
    """Data: definitions of the standard library, or text cut to the lengths of a heavy lognormal
    or of a balanced video set, scaled so that the longest is --max-length."""

    settings: str | None = None
    """Any of unpaced (the link as it is, no memory budget), network (as it is, with a budget),
    7b-node, 7b-cross-node (paced, with a budget); `-no-budget` after a name lifts it. Empty: only
    virtual ranks. Default: 7b-cross-node; native also unpaced, 7b-node, 7b-cross-node-no-budget."""

    strategies: str | None = None
    """Comma-separated; default: what the trainer's page of docs/performance.md lists."""

    virtual_ranks: str | None = None
    """Virtual clusters, in ranks; empty: none. Default: native 8,32, else none."""

    repeats: int = 5
    virtual_repeats: int = 3
    max_length: int = 8192
    """Longest sample in tokens."""

    memory_tokens: int = 4096
    """Budget of the paced settings: tokens that one rank holds without recompute."""

    virtual_memory_tokens: int = 1024
    """The same for virtual ranks: an eighth of the longest sample, as a 128K context on ranks that
    hold 16K."""

    seed: int = 0
    lr: float = 1e-3

    model: str = "small"
    """`small` (1 M parameters) or a preset (gpt-1.3b ...), for GPUs."""

    device: str = "cpu"
    """Where ranks train (the native trainer, NCCL) and virtual ranks are replayed: cpu or cuda."""

    hardware: str | None = None
    """Links of this preset (h100 ...) instead of a scale model's (virtual ranks) or of the measured
    one (setting network)."""

    out: Path = Path("runs/end_to_end")
    """Folder of the run directories and bench.json."""

    quick: bool = False
    """A small version of everything asked: short samples, few repeats. All of it takes about
    3 minutes."""

    bars: bool = False
    """Exit with 1 when a bar is missed."""

    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """One JSON object on stdout and nothing else."""

    def __post_init__(self) -> None:
        for name in ("ranks", "repeats", "virtual_repeats", "max_length", "memory_tokens",
                     "virtual_memory_tokens"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1")
        if self.seed < 0:
            raise ConfigError(f"--seed is {self.seed}; use >= 0")
        if not 0 < self.lr < math.inf:
            raise ConfigError(f"--lr is {self.lr}; use a number above 0")
        if self.device not in ("cpu", "cuda"):
            raise ConfigError(f"--device {self.device!r}: use cpu or cuda")
        if self.model != "small":
            model_preset(self.model)
        if self.hardware is not None:
            hardware_preset(self.hardware)
        for name in self.set_names:
            if name not in SETS:
                raise ConfigError(f"--sets {name!r}: known are {', '.join(SETS)}")
        for setting in self.setting_names:
            if setting.removesuffix(NO_BUDGET) not in SETTINGS:
                raise ConfigError(
                    f"--settings {setting!r}: known are {', '.join(SETTINGS)}, each also with "
                    f"{NO_BUDGET}"
                )
        if self.ranks == 1 and self.setting_names:
            raise ConfigError("--ranks 1 measures no training; pass --settings '' or more ranks")
        if self.clusters and not self.native:
            raise ConfigError(
                "virtual ranks run the native trainer alone; leave out --virtual-ranks"
            )

    def sized(self) -> EndToEndOptions:
        """These options, made small where --quick asks for it."""
        if not self.quick:
            return self
        return replace(
            self, quick=False, max_length=min(self.max_length, 512), memory_tokens=256,
            virtual_memory_tokens=64, repeats=min(self.repeats, 2), virtual_repeats=1,
        )  # fmt: skip

    @property
    def native(self) -> bool:
        return self.trainer == "native"

    @property
    def set_names(self) -> list[str]:
        return _names(self.sets)

    @property
    def strategy_names(self) -> list[str]:
        """As asked; empty: the trainer's own."""
        return _names(self.strategies or "")

    @property
    def setting_names(self) -> list[str]:
        if self.settings is not None:
            return _names(self.settings)
        mine = ["unpaced", "7b-node", "7b-cross-node", "7b-cross-node" + NO_BUDGET]
        return mine if self.native else ["7b-cross-node"]

    @property
    def clusters(self) -> list[int]:
        text = ("8,32" if self.native else "") if self.virtual_ranks is None else self.virtual_ranks
        try:
            found = [int(x) for x in _names(text)]
        except ValueError:
            found = [0]
        if any(n < 2 for n in found):
            raise ConfigError(
                f"--virtual-ranks {text!r}: numbers of ranks, at least 2, with commas"
            )
        return found

    def budget_tokens(self, setting: str) -> int | None:
        """Tokens per rank in a setting; None: no budget."""
        free = setting.endswith(NO_BUDGET) or setting == "unpaced"
        return None if free else self.memory_tokens


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(x.strip() for x in text.split(",") if x.strip()))
