"""Which samples make which step: a global shuffle without replacement, a function of the step.

Each sample comes once per epoch. The samples of a step depend on (size, batch, seed, shuffle,
remainder, step) alone: not on ranks, plan or time. So a resume needs the step number only, also on
another number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from megatron_dcp.config import check_at_least
from megatron_dcp.errors import ConfigError

Remainder = Literal["drop", "short"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerConfig:
    """remainder: samples that fill no whole batch at the end of an epoch are left out of it
    (`drop`) or make a shorter last step (`short`)."""

    size: int
    batch: int
    seed: int = 0
    shuffle: bool = True
    remainder: Remainder = "drop"

    def __post_init__(self) -> None:
        if self.remainder not in ("drop", "short"):
            raise ConfigError(f"remainder={self.remainder!r}: use 'drop' or 'short'")
        check_at_least("seed", self.seed, 0)
        check_at_least("global_batch_size", self.batch, 1)
        if self.size < 1:
            raise ConfigError(f"a data set of {self.size} samples: it must have at least 1")
        if self.steps_per_epoch < 1:
            raise ConfigError(
                f"global_batch_size {self.batch} is larger than the data set ({self.size} samples) "
                "and remainder='drop' leaves no step; use remainder='short' or a smaller batch"
            )

    @property
    def steps_per_epoch(self) -> int:
        whole, rest = divmod(self.size, self.batch)
        return whole + (1 if rest and self.remainder == "short" else 0)


class GlobalSampler:
    """`indices(step)`: dataset indices of a step, in a fixed order."""

    def __init__(self, config: SamplerConfig) -> None:
        self.config = config
        self._epoch = -1
        self._order: np.ndarray[Any, np.dtype[np.int64]] | None = None

    def epoch(self, step: int) -> int:
        """The epoch that a step belongs to, from 0."""
        return step // self.config.steps_per_epoch

    def indices(self, step: int) -> list[int]:
        """Dataset indices of the step, ascending in the epoch's order."""
        epoch, at = divmod(step, self.config.steps_per_epoch)
        if epoch != self._epoch or self._order is None:
            self._order = self._permutation(epoch)
            self._epoch = epoch
        first = at * self.config.batch
        chosen: list[int] = self._order[first : first + self.config.batch].tolist()
        return chosen

    def _permutation(self, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        if not self.config.shuffle:
            return np.arange(self.config.size, dtype=np.int64)
        seed = np.random.SeedSequence([self.config.seed, epoch])
        order = np.random.Generator(np.random.PCG64(seed)).permutation(self.config.size)
        return order.astype(np.int64)

    def state(self) -> dict[str, Any]:
        """What must be equal for a resume to draw the same samples."""
        c = self.config
        return {
            "size": c.size,
            "batch": c.batch,
            "seed": c.seed,
            "shuffle": c.shuffle,
            "remainder": c.remainder,
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a state of another data set or order."""
        check_sampler_state(self.state(), state)


def check_sampler_state(mine: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """ConfigError where a checkpoint's sampler would draw other samples."""
    wrong = [k for k in mine if state.get(k) != mine[k]]
    if wrong:
        raise ConfigError(
            "the checkpoint was written with another sampler: "
            + ", ".join(f"{k} was {state.get(k)!r}, is {mine[k]!r}" for k in wrong)
            + "; resume with the same data set, global_batch_size, seed and remainder"
        )
