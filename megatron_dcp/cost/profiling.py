"""From measured microbatches (`cost/cases.py`) to a cost profile: the fit. No torch.

Two depths of one model separate what each layer costs from what the model costs once; packs of one
long and of many short samples separate pairs from tokens; recomputed and shared microbatches give
the recompute fractions and the links. All fits are non-negative, relative and robust (`cost.fit`).

    time(depth D, r recomputed, T tokens, A pairs, degree 1)
        = D (a T + b A + c) + (h T + o) + r (f T + g A)
    linear_us_per_token = L a + h      attn_us_per_pair = L b      overhead = L c + o

Degrees above 1 compute T/d and A/d at these rates; what remains is fitted to wire bytes and
messages, one link row per degree. Memory:

    bytes = base + T/d (kept (D - r) + checkpoint r + once)

Half lengths are left at 0: their effect lies in the coefficients over the measured range.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_dcp.cost.cases import Case, Point, group_of
from megatron_dcp.cost.fit import fit, leave_one_out, nonnegative_least_squares
from megatron_dcp.cost.model import CostModel, Pack, messages, sample_pack, wire_bytes
from megatron_dcp.cost.profile import (
    CostProfile,
    Link,
    ModelShape,
    Overhead,
    RecomputeFraction,
)
from megatron_dcp.errors import ConfigError
from megatron_dcp.plan import Topology

Array = NDArray[np.float64]


def _pack(pairs: str, case: Case) -> Pack:
    probe = _shape_profile(pairs)
    total = Pack()
    for n in case.lengths:
        total = total + sample_pack(probe, n)
    return total


def _shape_profile(pairs: str, model: ModelShape | None = None, depth: int = 1) -> CostProfile:
    """A profile that only counts (pairs, wire bytes)."""
    m = model or ModelShape(
        layers=depth, heads=1, kv_heads=1, head_dim=1, hidden=1, vocab=1, element_bytes=4
    )
    links = (Link(max_degree=1, us_per_byte=0.0, latency_us=0.0),)
    return CostProfile(name="counting", model=m, pairs=pairs, links=links)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """The profile, and per group of points the median leave-one-out error (relative)."""

    profile: CostProfile
    errors: dict[str, float]
    predictions: list[tuple[str, float, float]]  # group, predicted us, measured us


def _features(pairs: str, case: Case) -> list[float]:
    k = _pack(pairs, case)
    t, a = k.tokens / case.degree, k.pairs / case.degree
    return [case.depth * t, case.depth * a, case.depth, t, 1.0]


def fit_profile(
    points: Sequence[Point],
    model: ModelShape,
    *,
    name: str,
    pairs: str = "causal",
    static_bytes: int = 0,
    budget_bytes: int = 0,
    fingerprint: Mapping[str, Any] | None = None,
) -> Fitted:
    """Fit all coefficients. Raises ConfigError where too few points were measured.

    static_bytes: weights, gradients and optimizer of the whole model, known without measuring.
    """
    good = [p for p in points if not p.oom]
    plain = [p for p in good if p.case.degree == 1 and p.case.recompute == 0]
    depths = {p.case.depth for p in plain}
    if len(plain) < 6 or len(depths) < 2:
        raise ConfigError(
            f"{len(plain)} plain points at depths {sorted(depths)}: the fit needs 6 or more at two "
            "depths; lower --max-tokens or free memory, then resume"
        )
    rows = np.array([_features(pairs, p.case) for p in plain])
    times = np.array([p.time_us for p in plain])
    base = np.asarray(fit(rows, times).coefficients)
    layers = model.layers
    linear, attention = layers * base[0] + base[3], layers * base[1]
    recomputed, shared = _recompute_rest(pairs, good, base), _link_rests(pairs, good, base, model)
    memory = _memory(good)
    profile = CostProfile(
        name=name,
        model=model,
        pairs=pairs,
        linear_us_per_token=float(linear),
        attn_us_per_pair=float(attention),
        recompute_fraction=_fractions(recomputed, layers, linear, attention),
        overhead_us=Overhead(
            async_=float(layers * base[2] + base[4]), lockstep=float(layers * base[2] + base[4])
        ),
        links=_links(shared),
        static_bytes=int(static_bytes + memory["base"]),
        kept_bytes_per_token_layer=memory["kept"],
        checkpoint_bytes_per_token_layer=memory["checkpoint"],
        working_bytes_per_token=memory["once"],
        budget_bytes=budget_bytes,
        fingerprint=dict(fingerprint or {}),
    )
    predictions = [_predict(p, base, profile) for p in good]
    errors = _plain_errors(rows, times, plain)
    if recomputed is not None:
        errors["recompute"] = float(np.median(recomputed.left_out()))
    if shared:
        errors["communication"] = float(
            np.median([e for r in shared.values() for e in r.left_out()])
        )
    if any(memory.values()):
        errors["memory"] = float(np.median(leave_one_out(*_memory_rows(good))))
    every = [abs(a / b - 1.0) for _, a, b in predictions]
    summary = {
        "median_error": float(np.median(every)), "points": len(good),
        "out_of_memory": sum(p.oom for p in points), **errors,
    }  # fmt: skip
    final = CostProfile(**{f: getattr(profile, f) for f in profile.__dataclass_fields__} | {
        "fit": summary})  # fmt: skip
    return Fitted(profile=final, errors=errors, predictions=predictions)


@dataclass(frozen=True, slots=True)
class _Rest:
    """Points whose time is the plain compute's plus rows @ x, x >= 0: what is left to fit.

    rows [points, terms]; rest [points], us beyond the plain compute; times [points], us.
    """

    rows: Array
    rest: Array
    times: Array

    def fit(self, chosen: Array | slice = slice(None)) -> Array:
        weight = 1.0 / self.times[chosen]
        rest = np.maximum(self.rest[chosen], 0.0)
        return nonnegative_least_squares(self.rows[chosen] * weight[:, None], rest * weight)

    def left_out(self) -> list[float]:
        """Relative error of each point's time under the fit to the others."""
        index = np.arange(len(self.times))
        return [
            abs(float(self.rows[i] @ self.fit(index[index != i]) - self.rest[i]) / self.times[i])
            for i in index
        ]


def _rest(
    pairs: str, points: Sequence[Point], base: Array, rows: Sequence[Sequence[float]]
) -> _Rest:
    times = np.array([p.time_us for p in points])
    plain = np.array([float(base @ _features(pairs, p.case)) for p in points])
    return _Rest(np.asarray(rows, dtype=np.float64), times - plain, times)


def _recompute_rest(pairs: str, good: Sequence[Point], base: Array) -> _Rest | None:
    """Extra time of recomputed layers, over layers x tokens and layers x pairs."""
    chosen = [p for p in good if p.case.degree == 1 and p.case.recompute > 0]
    packs = [_pack(pairs, p.case) for p in chosen]
    rows = [
        [p.case.recompute * k.tokens, p.case.recompute * k.pairs]
        for p, k in zip(chosen, packs, strict=True)
    ]
    return _rest(pairs, chosen, base, rows) if chosen else None


def _fractions(
    rest: _Rest | None, layers: int, linear: float, attention: float
) -> RecomputeFraction:
    """The extra time as fractions of the whole model's terms."""
    if rest is None:
        return RecomputeFraction(linear=1 / 3, attention=1 / 3, comm=0.5)
    x = rest.fit()
    return RecomputeFraction(
        linear=float(min(1.0, x[0] * layers / linear)) if linear else 0.0,
        attention=float(min(1.0, x[1] * layers / attention)) if attention else 0.0,
        comm=0.5,
    )


def _link_rests(
    pairs: str, good: Sequence[Point], base: Array, model: ModelShape
) -> dict[int, _Rest]:
    """Per measured degree what the shares of compute leave, over bytes and messages."""
    out = {}
    counting = _shape_profile(pairs, model)
    for degree in sorted({p.case.degree for p in good if p.case.degree > 1}):
        chosen = [p for p in good if p.case.degree == degree]
        rows = [
            [c.depth * sum(wire_bytes(counting, c.mode, c.tokens, degree)),
             c.depth * float(sum(messages(c.mode, degree)))]
            for c in (p.case for p in chosen)
        ]  # fmt: skip
        out[degree] = _rest(pairs, chosen, base, rows)
    return out


def _links(rests: Mapping[int, _Rest]) -> tuple[Link, ...]:
    """One row per measured degree."""
    out = []
    for degree, rest in rests.items():
        x = rest.fit()
        out.append(Link(max_degree=degree, us_per_byte=float(x[0]), latency_us=float(x[1])))
    return tuple(out) or (Link(max_degree=1, us_per_byte=0.0, latency_us=0.0),)


def _memory(good: Sequence[Point]) -> dict[str, float]:
    """Bytes per token: kept and checkpoint per layer, once per model; and a constant."""
    names = ("kept", "checkpoint", "once", "base")
    rows, peaks = _memory_rows(good)
    if len(peaks) < len(names) + 1:
        return dict.fromkeys(names, 0.0)
    return dict(zip(names, fit(rows, peaks).coefficients, strict=True))


def _memory_rows(good: Sequence[Point]) -> tuple[Array, Array]:
    """Features and peak bytes of the points whose peak is known."""
    rows, peaks = [], []
    for p in good:
        if p.peak_bytes:
            x = p.case.tokens / p.case.degree
            rows.append([x * (p.case.depth - p.case.recompute), x * p.case.recompute, x, 1.0])
            peaks.append(float(p.peak_bytes))
    return np.array(rows), np.array(peaks)


def _predict(point: Point, base: Array, profile: CostProfile) -> tuple[str, float, float]:
    c = point.case
    if c.depth != profile.model.layers:  # the profile speaks of the whole model only
        time = float(base @ _features(profile.pairs, c))
        f, k = profile.recompute_fraction, _pack(profile.pairs, c)
        share = c.recompute / profile.model.layers
        time += share * f.linear * profile.linear_us_per_token * k.tokens / c.degree
        time += share * f.attention * profile.attn_us_per_pair * k.pairs / c.degree
        if c.degree > 1:
            link = profile.link(c.degree)
            sent = sum(wire_bytes(profile, c.mode, c.tokens, c.degree))
            time += c.depth * (sent * link.us_per_byte
                               + sum(messages(c.mode, c.degree)) * link.latency_us)  # fmt: skip
        return group_of(c), time, point.time_us
    cost = CostModel(profile, Topology(data_ranks=c.degree, ranks_per_node=c.degree))
    pack = _pack(profile.pairs, c)
    return group_of(c), float(cost.time_us(pack, c.degree, c.mode, c.recompute)), point.time_us


def _plain_errors(rows: Array, times: Array, plain: Sequence[Point]) -> dict[str, float]:
    """Median leave-one-out error of the linear and of the attention points."""
    out: dict[str, list[float]] = {}
    for point, error in zip(plain, leave_one_out(rows, times), strict=True):
        out.setdefault(group_of(point.case), []).append(error)
    return {group: float(np.median(values)) for group, values in out.items()}


def check_fingerprint(
    profile: CostProfile, here: Mapping[str, Any], *, force: bool = False
) -> list[str]:
    """Refuse a profile that was measured on another device or model; returns what differs.

    Only keys that both sides have are compared; `force` returns the differences instead of
    raising.
    """
    differing = [
        f"{key}: profile {profile.fingerprint[key]!r}, here {here[key]!r}"
        for key in sorted(profile.fingerprint.keys() & here.keys())
        if profile.fingerprint[key] != here[key]
    ]
    if differing and not force:
        raise ConfigError(
            f"cost profile {profile.name!r} was measured elsewhere ({'; '.join(differing)}); "
            "run `mdcp profile` here, or force it if you know that they are alike"
        )
    return differing
