"""Fit non-negative coefficients to measured times: relative errors, robust to a few outliers.

Every time model here is linear in its coefficients, with at most six of them, so the non-negative
least-squares optimum is found exactly by trying every set of active coefficients. Outliers (a
shared machine has them) are down-weighted by a few rounds of Huber re-weighting.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from megatron_dcp.errors import ConfigError

Array = npt.NDArray[np.float64]
_HUBER = 1.345  # 95 % efficiency on normal errors
_ROUNDS = 10
MAX_TERMS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """coefficients: one per feature column, >= 0; error: |predicted / measured - 1| per point."""

    coefficients: tuple[float, ...]
    error: tuple[float, ...]

    @property
    def median_error(self) -> float:
        return float(np.median(self.error))


def nonnegative_least_squares(a: Array, b: Array) -> Array:
    """argmin ||a x - b|| over x >= 0, exactly; a [points, terms] with terms <= MAX_TERMS."""
    terms = a.shape[1]
    if terms > MAX_TERMS:
        raise ConfigError(f"{terms} coefficients to fit; at most {MAX_TERMS} are supported")
    best, best_error = np.zeros(terms), float(b @ b)
    for size in range(1, terms + 1):
        for active in combinations(range(terms), size):
            columns = list(active)
            x = np.linalg.lstsq(a[:, columns], b, rcond=None)[0]
            if (x < 0).any():
                continue
            residual = a[:, columns] @ x - b
            error = float(residual @ residual)
            if error < best_error * (1 - 1e-12):
                best, best_error = np.zeros(terms), error
                best[columns] = x
    return best


def fit(features: npt.ArrayLike, times: npt.ArrayLike) -> Fit:
    """Fit times [points] to features [points, terms]; errors are relative to the measured time."""
    a, b = np.asarray(features, dtype=np.float64), np.asarray(times, dtype=np.float64)
    if a.ndim != 2 or len(a) != len(b) or len(b) < a.shape[1]:
        raise ConfigError(
            f"{len(b)} measured points for {a.shape[-1]} coefficients; measure at least as many"
        )
    if not (np.isfinite(a).all() and np.isfinite(b).all() and (b > 0).all()):
        raise ConfigError("measured times must be finite and positive; measure the points again")
    scaled = a / b[:, None]
    weight = np.ones(len(b))
    x = np.zeros(a.shape[1])
    for _ in range(_ROUNDS):
        x = nonnegative_least_squares(scaled * weight[:, None], weight)
        residual = np.abs(scaled @ x - 1.0)
        spread = max(float(np.median(residual)) / 0.6745, 1e-9)
        weight = np.sqrt(np.minimum(1.0, _HUBER * spread / np.maximum(residual, 1e-12)))
    return Fit(coefficients=tuple(x.tolist()), error=tuple(np.abs(scaled @ x - 1.0).tolist()))


def leave_one_out(features: npt.ArrayLike, times: npt.ArrayLike) -> tuple[float, ...]:
    """|predicted / measured - 1| of each point from a fit to all the others."""
    a, b = np.asarray(features, dtype=np.float64), np.asarray(times, dtype=np.float64)
    out = []
    for i in range(len(b)):
        keep = np.arange(len(b)) != i
        x = np.asarray(fit(a[keep], b[keep]).coefficients)
        out.append(abs(float(a[i] @ x) / float(b[i]) - 1.0))
    return tuple(out)
