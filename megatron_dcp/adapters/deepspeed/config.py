"""A stock `ds_config.json` with one added section, split into DeepSpeed's part and ours.

    "megatron_dcp": {"cost": "profile.json", "memory": 60, "strategy": "dcp", "coalesce": false,
                     "lengths": "length", "epochs": 1, "seed": 0, "shuffle": true}

The batch sizes keep their meaning: DeepSpeed's rule (train_batch_size = micro batch * accumulation
* ranks) gives the samples of one optimizer step. DeepSpeed itself is then told accumulation 1,
because the plan decides how many microbatches each rank runs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from megatron_dcp.errors import AdapterError, ConfigError

SECTION = "megatron_dcp"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedOptions:
    """The section. coalesce: ZeRO-2 reduces once per step (unequal counts, whole gradients held).

    lengths, epochs, seed, shuffle, remainder, max_length, tokens: of the loader. The rest goes to
    `mdcp.initialize`.
    """

    cost: str = "auto"
    memory: str | float = "auto"
    strategy: str = "dcp"
    lockstep: str | int = "auto"
    normalize: Literal["token", "sample"] = "token"
    recompute: Literal["auto", "off"] = "auto"
    oversize: Literal["error", "drop", "truncate"] = "error"
    coalesce: bool = False
    measure: bool = False
    plan_ahead: int = 1
    timeout_s: float | None = None
    ranks_per_node: int | None = None
    lengths: str = "length"
    epochs: int = 1
    seed: int = 0
    shuffle: bool = True
    remainder: Literal["drop", "short"] = "drop"
    max_length: int | None = None
    tokens: str = "input_ids"
    batch_dim: bool = True

    def __post_init__(self) -> None:
        # JSON says `"false"` where false was meant, and a word would count as true.
        for name in ("coalesce", "measure", "shuffle", "batch_dim"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(
                    f"{SECTION}.{name} is {getattr(self, name)!r} in the DeepSpeed config; use "
                    "true or false"
                )

    def engine_arguments(self) -> dict[str, Any]:
        """Keyword arguments of `mdcp.initialize`."""
        own = (*_LOADER_FIELDS, "coalesce")
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in own}

    def loader_arguments(self) -> dict[str, Any]:
        """Keyword arguments of `engine.dataloader`."""
        return {name: getattr(self, name) for name in _LOADER_FIELDS}


_LOADER_FIELDS = (
    "lengths", "epochs", "seed", "shuffle", "remainder", "max_length", "tokens", "batch_dim",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitConfig:
    """deepspeed: what DeepSpeed is given. global_batch: samples per optimizer step."""

    deepspeed: dict[str, Any]
    options: DeepSpeedOptions
    global_batch: int
    notes: tuple[str, ...]


def read_config(config: str | Path | dict[str, Any]) -> dict[str, Any]:
    """A DeepSpeed config from a mapping or a JSON file."""
    if isinstance(config, dict):
        return dict(config)
    try:
        found = json.loads(Path(config).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"DeepSpeed config {str(config)!r} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"DeepSpeed config {str(config)!r} holds no JSON object")
    return found


def split_config(config: str | Path | dict[str, Any], ranks: int) -> SplitConfig:
    """Split a config for `ranks` data ranks; refuses what a plan cannot be run with."""
    stock = read_config(config)
    section = stock.pop(SECTION, {})
    if not isinstance(section, dict):
        raise ConfigError(f"section {SECTION!r} of the DeepSpeed config is no JSON object")
    known = {f.name for f in fields(DeepSpeedOptions)}
    unknown = sorted(set(section) - known)
    if unknown:
        raise ConfigError(
            f"section {SECTION!r} of the DeepSpeed config has unknown keys {unknown}; known: "
            f"{sorted(known)}"
        )
    _refuse(stock)
    batch = _global_batch(stock, ranks)
    notes = []
    micro = max(1, batch // ranks)
    stock["gradient_accumulation_steps"] = 1
    stock["train_micro_batch_size_per_gpu"] = micro
    stock["train_batch_size"] = micro * ranks
    notes.append(
        f"{batch} samples per optimizer step; DeepSpeed is told accumulation 1 and counts "
        f"{micro * ranks} samples per step in its own logs"
    )
    if "gradient_clipping" not in stock:
        # The default has changed between releases (1.0 since 0.19.3): write down what will be used.
        stock["gradient_clipping"] = _default_clipping()
        notes.append(
            f"gradient_clipping is not set; this DeepSpeed's default {stock['gradient_clipping']} "
            "is used (set 0.0 for none)"
        )
    return SplitConfig(
        deepspeed=stock,
        options=DeepSpeedOptions(**section),
        global_batch=batch,
        notes=tuple(notes),
    )


def _default_clipping() -> float:
    from deepspeed.runtime.constants import GRADIENT_CLIPPING_DEFAULT

    return float(GRADIENT_CLIPPING_DEFAULT)


def _global_batch(stock: dict[str, Any], ranks: int) -> int:
    """train_batch_size by DeepSpeed's rule, from whichever of the three numbers are given."""
    total = _number(stock, "train_batch_size")
    micro = _number(stock, "train_micro_batch_size_per_gpu")
    steps = _number(stock, "gradient_accumulation_steps")
    if total is None:
        if micro is None:
            raise ConfigError(
                "the DeepSpeed config names neither train_batch_size nor "
                "train_micro_batch_size_per_gpu; set train_batch_size to the samples per step"
            )
        return micro * (steps or 1) * ranks
    if micro is not None and steps is not None and micro * steps * ranks != total:
        raise ConfigError(
            f"train_batch_size {total} is not train_micro_batch_size_per_gpu {micro} * "
            f"gradient_accumulation_steps {steps} * {ranks} ranks"
        )
    return total


def _number(stock: dict[str, Any], name: str) -> int | None:
    value = stock.get(name)
    if value is None or value == "auto":
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(
            f"{name} is {value!r} in the DeepSpeed config; it must be an integer >= 1"
        )
    return value


def _refuse(stock: dict[str, Any]) -> None:
    wrong = []
    if stock.get("managed_gradient_accumulation") is False:
        wrong.append("managed_gradient_accumulation: false")
    if stock.get("sequence_parallel_size", 1) not in (0, 1):
        wrong.append(
            f"sequence_parallel_size {stock['sequence_parallel_size']} (the plan shares sequences, "
            "sample by sample)"
        )
    compiled = stock.get("compile")
    if isinstance(compiled, dict) and compiled.get("deepcompile"):
        wrong.append("compile.deepcompile (it fixes the order of gathers for one shape)")
    if wrong:
        raise AdapterError(
            "the DeepSpeed config sets " + "; ".join(wrong) + ": remove these to run under plans"
        )
