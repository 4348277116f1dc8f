"""Configuration records: frozen, keyword-only, slotted dataclasses; unit in the field's name.

The same dataclass makes the command line, the YAML file, the `--mdcp-*` flags and the docs table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from megatron_dcp.errors import ConfigError

Normalize = Literal["token", "sample"]
Oversize = Literal["error", "drop", "truncate"]


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises ConfigError unless `value` is one of `choices`."""
    if value not in choices:
        raise ConfigError(f"{name}={value!r}: use one of {', '.join(choices)}")


def check_above_zero(name: str, value: float | None) -> None:
    """Raises ConfigError unless `value` is None or a number above 0 (which a NaN is not)."""
    if value is not None and not value > 0:
        raise ConfigError(f"{name}={value!r}: use a number above 0, or None")


def check_at_least(name: str, value: int | None, least: int) -> None:
    """Raises ConfigError unless `value` is None or an integer >= `least`."""
    if value is not None and (not isinstance(value, int) or value < least):
        raise ConfigError(f"{name}={value!r}: use an integer >= {least}")


def check_calls(name: str, value: object, methods: tuple[str, ...]) -> None:
    """Raises ConfigError unless `value` is None or an object with these methods."""
    missing = [m for m in methods if not callable(getattr(value, m, None))]
    if value is not None and missing:
        raise ConfigError(
            f"{name}={value!r}: has no {' and no '.join(missing)}; pass the {name} object or None"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerConfig:
    """How the plan of each step is made.

    strategy: a name of the registry, parameters after a colon.
    cost: `auto`, a profile preset or a profile file.
    memory_gb: budget per data rank, 1e9 bytes; None takes the profile's.
    lockstep: `auto`, 1, `node`, `all` or ranks per domain.
    recompute: `auto` lets the planner recompute activations, `off` forbids it.
    oversize: what happens to a sample that cannot fit on all ranks with full recompute.
    """

    strategy: str = "dcp"
    cost: str = "auto"
    memory_gb: float | None = None
    lockstep: str = "auto"
    recompute: Literal["auto", "off"] = "auto"
    oversize: Oversize = "error"

    def __post_init__(self) -> None:
        check_choice("recompute", self.recompute, ("auto", "off"))
        check_choice("oversize", self.oversize, get_args(Oversize))
        check_above_zero("memory_gb", self.memory_gb)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """How a plan is executed.

    normalize: the loss of a step is its weighted sum over tokens divided by the sum of weights
    (`token`), or the mean over samples of each sample's token mean (`sample`).
    max_grad_norm: clip the gradient of the global batch to this norm, None is off.
    float32_gradients: accumulate and reduce gradients of bfloat16 and float16 parameters in float32
    (plain modules and DistributedDataParallel; FSDP2 and DeepSpeed have options of their own).
    ema_decay: keep a moving average of the parameters, None is off.
    plan_ahead: steps planned and read in the background while one runs; 0 does it in line.
    measure: wait for a block before each placement so that waiting and communication can be told
    apart, and record events.
    timeout_s: of collectives in groups made here; None takes the backend's.
    watchdog_s: a rank that waits longer than this inside a step ends the job with a message that
    names who did not arrive; None is off. watchdog_dir: where it leaves the plan and the stacks.
    """

    normalize: Normalize = "token"
    max_grad_norm: float | None = None
    float32_gradients: bool = True
    ema_decay: float | None = None
    plan_ahead: int = 1
    measure: bool = False
    timeout_s: float | None = None
    watchdog_s: float | None = None
    watchdog_dir: str = "."

    def __post_init__(self) -> None:
        check_choice("normalize", self.normalize, get_args(Normalize))
        check_at_least("plan_ahead", self.plan_ahead, 0)
        for name in ("max_grad_norm", "timeout_s", "watchdog_s"):
            check_above_zero(name, getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronConfig:
    """What the Megatron adapter needs besides the planner's options.

    max_tokens_per_rank: tokens that fit one data rank without recomputation; gives the memory
    budget where memory_gb does not. split: what is one sample of a row of the data set: `windows`
    (the whole row), `documents`, or `auto` (documents where Megatron's own flags keep them apart).
    no_trim: keep trailing tokens without loss weight. forward_step: `package.module:function`, a
    forward step of your own instead of GPT's. allow_plan_dependent: run models whose gradients
    depend on the plan (hidden dropout, router settings that see whole microbatches), with a warning
    that names them. allow_untested: run a Megatron version outside the table. plan_dir: write every
    plan there as JSON.
    """

    max_tokens_per_rank: int | None = None
    split: Literal["auto", "windows", "documents"] = "auto"
    no_trim: bool = False
    forward_step: str | None = None
    allow_plan_dependent: bool = False
    allow_untested: bool = False
    plan_dir: str | None = None
