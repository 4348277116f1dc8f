"""Refit during training: recursive least squares with forgetting on measured slot times.

Nothing changes by itself. The refit watches (`observe`), reports its own and the profile's
prediction error, and makes a *proposal*; whoever runs the training may adopt it at a checkpoint,
as a new profile version with a new name and digest. Off by default, because plans are a function
of the profile's digest.

Errors are relative: each observation is divided by its measured time, so that long and short
microbatches count alike. The state is scaled by the profile's own coefficients, which makes the
start covariance unit-free; coefficients that would turn negative are set to 0 in the proposal.
All ranks must be fed the same observations (the slowest rank of each placement) to agree.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_dcp.cost.features import (
    TERMS,
    Coefficients,
    check_linear,
    coefficients,
    features,
    with_coefficients,
)
from megatron_dcp.cost.model import CostModel, Mode, pack_of
from megatron_dcp.cost.profile import CostProfile
from megatron_dcp.errors import ConfigError
from megatron_dcp.plan import StepPlan

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A new profile version and why: mean relative errors over the remembered observations."""

    profile: CostProfile
    error_before: float
    error_after: float
    observations: int

    def log_line(self) -> str:
        return (
            f"cost refit proposed: {self.profile.name}, mean error {self.error_before:.1%} -> "
            f"{self.error_after:.1%} over {self.observations} microbatches; adopted only at a "
            "checkpoint"
        )


@dataclass(slots=True, kw_only=True)
class OnlineRefit:
    """Recursive least squares over the coefficients of one cost model.

    forgetting: weight of an observation after one more (0.995: a memory of about 200).
    prior: standard deviation of each coefficient around the profile's, relative to it.
    outlier: observations off by more than this factor of the prediction are clipped to it.
    """

    cost: CostModel
    forgetting: float = 0.995
    prior: float = 0.5
    outlier: float = 3.0
    version: int = 1
    observations: int = 0
    _scale: Array = field(init=False)
    _theta: Array = field(init=False)
    _covariance: Array = field(init=False)
    _error_before: float = 0.0
    _error_after: float = 0.0
    _weight: float = 0.0

    def __post_init__(self) -> None:
        check_linear(self.cost.profile)
        if not 0.9 <= self.forgetting <= 1.0:
            raise ConfigError(f"refit: forgetting {self.forgetting} found, use 0.9 .. 1.0")
        start = coefficients(self.cost).vector()
        self._scale = np.where(start > 0, start, 1.0)
        self._theta = start / self._scale
        # a coefficient that the profile leaves at 0 stays there: nothing scales it
        self._covariance = np.diag(np.where(start > 0, self.prior**2, 0.0)) / _NOISE**2

    def observe(self, row: list[float], measured_us: float) -> float:
        """One placement: its `features` and its measured time. Returns the signed relative error
        of the profile in use (predicted / measured - 1)."""
        if not measured_us > 0:
            raise ConfigError(f"refit: measured time {measured_us!r} us; it must be positive")
        x = np.asarray(row) * self._scale / measured_us
        used = coefficients(self.cost).vector() / self._scale
        error = float(x @ used) - 1.0
        residual = 1.0 - float(x @ self._theta)
        limit = self.outlier * _NOISE
        if abs(residual) > limit and self.observations > len(TERMS) * 4:
            residual = float(np.clip(residual, -limit, limit))
        gain = self._covariance @ x
        gain = gain / (self.forgetting + float(x @ gain))
        self._theta = self._theta + gain * residual
        self._covariance = (self._covariance - np.outer(gain, x @ self._covariance)) / (
            self.forgetting
        )
        # Directions that no data excites would grow without bound under forgetting.
        top = self.prior**2 / _NOISE**2
        self._covariance *= min(1.0, top / max(float(np.max(np.diag(self._covariance))), 1e-30))
        self._weight = self._weight * self.forgetting + 1.0
        self._error_before += (abs(error) - self._error_before) / self._weight
        after = abs(float(x @ np.maximum(self._theta, 0.0)) - 1.0)
        self._error_after += (after - self._error_after) / self._weight
        self.observations += 1
        return error

    def observe_plan(self, plan: StepPlan, measured_us: dict[int, float]) -> list[float]:
        """All measured placements of a step, by index into plan.placements, in plan order."""
        errors = []
        for i in sorted(measured_us):
            p = plan.placements[i]
            pack = pack_of(self.cost.profile, plan.workload, p.samples)
            mode = Mode(p.scheme, p.inner_degree)
            row = features(self.cost, pack, p.degree, mode, p.recompute)
            errors.append(self.observe(row, measured_us[i]))
        return errors

    @property
    def metrics(self) -> dict[str, float]:
        """For the metric sinks: mean relative errors of the profile in use and of the refit."""
        return {
            "cost/error_in_use": self._error_before,
            "cost/error_refit": self._error_after,
            "cost/observations": float(self.observations),
        }

    def propose(self, *, least_gain: float = 0.02) -> Proposal | None:
        """A new version when it predicts better by `least_gain` (absolute), else None."""
        if self.observations < 4 * len(TERMS):
            return None
        if self._error_before - self._error_after < least_gain:
            return None
        values = np.maximum(self._theta, 0.0) * self._scale
        stem = self.cost.profile.name.partition("+refit")[0]
        profile = with_coefficients(
            self.cost, Coefficients(*(float(v) for v in values)), f"{stem}+refit{self.version}"
        )
        fit: dict[str, Any] = {"mean_error": self._error_after, "points": self.observations}
        return Proposal(
            profile=replace(profile, fit=fit),
            error_before=self._error_before,
            error_after=self._error_after,
            observations=self.observations,
        )

    def adopt(self, profile: CostProfile) -> OnlineRefit:
        """Go on with a proposal's profile; call at a checkpoint and nowhere else."""
        return OnlineRefit(
            cost=replace(self.cost, profile=profile),
            forgetting=self.forgetting,
            prior=self.prior,
            outlier=self.outlier,
            version=self.version + 1,
        )


# Standard deviation of one relative measurement: what a shared machine's timing scatters by.
_NOISE = 0.05
