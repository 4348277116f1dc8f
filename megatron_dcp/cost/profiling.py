"""From measured microbatches to a cost profile: the grid, the points, the fit. No torch.

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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_dcp.cost.fit import fit, leave_one_out, nonnegative_least_squares
from megatron_dcp.cost.model import CostModel, Mode, Pack, messages, sample_pack, wire_bytes
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One microbatch to measure: samples of `lengths` on `degree` ranks, `recompute` of `depth`
    layers recomputed. Every block of the world runs the same case at once."""

    depth: int
    lengths: tuple[int, ...]
    degree: int = 1
    scheme: str = "local"
    inner_degree: int = 1
    recompute: int = 0

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def mode(self) -> Mode:
        return Mode(self.scheme, self.inner_degree)

    @property
    def order(self) -> tuple[int, float, int, int]:
        """Small cases first: what runs out of memory rules out the larger ones."""
        return (self.degree, self.tokens / self.degree, self.recompute, self.depth)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A measured case: median time (us, slowest rank), peak bytes above the idle state (None where
    the device does not tell), or out of memory on at least one rank."""

    case: Case
    time_us: float = 0.0
    peak_bytes: int | None = None
    oom: bool = False

    def to_object(self) -> dict[str, Any]:
        return asdict(self)


def point_from_object(obj: Mapping[str, Any]) -> Point:
    try:
        case = Case(**{**obj["case"], "lengths": tuple(obj["case"]["lengths"])})
        return Point(**{**obj, "case": case})
    except (KeyError, TypeError) as error:
        raise ConfigError(f"not a measured point: {error}; remove the points file") from error


def grid(
    layers: int,
    max_tokens: int,
    modes: Mapping[int, Sequence[Mode]],
    *,
    depths: tuple[int, int] | None = None,
) -> list[Case]:
    """Cases of both depths: single samples and packs up to max_tokens per rank, smallest first.

    modes: degree -> schemes to measure. Recompute of all layers is measured at degree 1, and
    at the larger depth; schemes at the larger depth.
    """
    small, large = depths or default_depths(layers)
    if not 1 <= small < large <= layers:
        raise ConfigError(
            f"depths {small}, {large} of {layers} layers: use 1 <= small < large <= L"
        )
    if max_tokens < 64:
        raise ConfigError(f"max_tokens is {max_tokens}; use at least 64")
    sizes = [max_tokens // k for k in (16, 8, 4, 2, 1)]
    packs: list[tuple[int, ...]] = [(n,) for n in sizes]
    packs += [(n // k,) * k for n in (sizes[1], sizes[3], sizes[4]) for k in (4, 16)]
    cases = [Case(depth=d, lengths=p) for d in (small, large) for p in packs]
    again = [packs[1], packs[3], packs[4], packs[-1]]
    cases += [Case(depth=large, lengths=p, recompute=large) for p in again]
    for degree, schemes in modes.items():
        for mode in schemes:
            for p in again:
                lengths = tuple(n * degree for n in p)
                cases.append(
                    Case(depth=large, lengths=lengths, degree=degree, scheme=mode.scheme,
                         inner_degree=mode.inner_degree)
                )  # fmt: skip
    return sorted(cases, key=lambda c: c.order)


def default_depths(layers: int) -> tuple[int, int]:
    """Half and all of a shallow model; a quarter and a half of a deep one."""
    if layers < 2:
        raise ConfigError(f"a model of {layers} layer cannot be profiled at two depths")
    if layers <= 8:
        return layers // 2, layers
    return layers // 4, layers // 2


def ruled_out(case: Case, points: Iterable[Point]) -> bool:
    """Whether an agreed out-of-memory point says that this case cannot fit either."""
    return any(
        p.oom
        and case.tokens / case.degree >= p.case.tokens / p.case.degree
        and case.depth >= p.case.depth
        and case.recompute <= p.case.recompute
        for p in points
    )


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
    fractions = _recompute(pairs, good, base, layers, linear, attention)
    links = _links(pairs, good, base, model)
    memory = _memory(good)
    profile = CostProfile(
        name=name,
        model=model,
        pairs=pairs,
        linear_us_per_token=float(linear),
        attn_us_per_pair=float(attention),
        recompute_fraction=fractions,
        overhead_us=Overhead(
            async_=float(layers * base[2] + base[4]), lockstep=float(layers * base[2] + base[4])
        ),
        links=links,
        static_bytes=int(static_bytes + memory["base"]),
        kept_bytes_per_token_layer=memory["kept"],
        checkpoint_bytes_per_token_layer=memory["checkpoint"],
        working_bytes_per_token=memory["once"],
        budget_bytes=budget_bytes,
        fingerprint=dict(fingerprint or {}),
    )
    predictions = [_predict(p, base, profile) for p in good]
    errors = _errors(rows, times, plain, predictions)
    errors |= _memory_error(good, memory)
    every = [abs(a / b - 1.0) for _, a, b in predictions]
    summary = {
        "median_error": float(np.median(every)), "points": len(good),
        "out_of_memory": sum(p.oom for p in points), **errors,
    }  # fmt: skip
    final = CostProfile(**{f: getattr(profile, f) for f in profile.__dataclass_fields__} | {
        "fit": summary})  # fmt: skip
    return Fitted(profile=final, errors=errors, predictions=predictions)


def _recompute(
    pairs: str, good: Sequence[Point], base: Array, layers: int, linear: float, attention: float
) -> RecomputeFraction:
    """Extra time of recomputed layers, as fractions of the whole model's terms."""
    chosen = [p for p in good if p.case.degree == 1 and p.case.recompute > 0]
    if not chosen:
        return RecomputeFraction(linear=1 / 3, attention=1 / 3, comm=0.5)
    rows, extra, scale = [], [], []
    for p in chosen:
        k = _pack(pairs, p.case)
        rows.append([p.case.recompute * k.tokens, p.case.recompute * k.pairs])
        extra.append(max(0.0, p.time_us - float(base @ _features(pairs, p.case))))
        scale.append(p.time_us)
    weight = 1.0 / np.asarray(scale)
    x = nonnegative_least_squares(np.asarray(rows) * weight[:, None], np.asarray(extra) * weight)
    return RecomputeFraction(
        linear=float(min(1.0, x[0] * layers / linear)) if linear else 0.0,
        attention=float(min(1.0, x[1] * layers / attention)) if attention else 0.0,
        comm=0.5,
    )


def _links(pairs: str, good: Sequence[Point], base: Array, model: ModelShape) -> tuple[Link, ...]:
    """One row per measured degree: what the shares of compute leave, over bytes and messages."""
    out = []
    for degree in sorted({p.case.degree for p in good if p.case.degree > 1}):
        rows, rest, scale = [], [], []
        for p in (p for p in good if p.case.degree == degree):
            c = p.case
            sent = sum(wire_bytes(_shape_profile(pairs, model), c.mode, c.tokens, degree))
            rows.append([c.depth * sent, c.depth * float(sum(messages(c.mode, degree)))])
            rest.append(max(0.0, p.time_us - float(base @ _features(pairs, c))))
            scale.append(p.time_us)
        weight = 1.0 / np.asarray(scale)
        x = nonnegative_least_squares(np.asarray(rows) * weight[:, None], np.asarray(rest) * weight)
        out.append(Link(max_degree=degree, us_per_byte=float(x[0]), latency_us=float(x[1])))
    return tuple(out) or (Link(max_degree=1, us_per_byte=0.0, latency_us=0.0),)


def _memory(good: Sequence[Point]) -> dict[str, float]:
    """Bytes per token: kept and checkpoint per layer, once per model; and a constant."""
    names = ("kept", "checkpoint", "once", "base")
    chosen = [p for p in good if p.peak_bytes]
    if len(chosen) < len(names):
        return dict.fromkeys(names, 0.0)
    rows = np.array([_memory_row(p.case) for p in chosen])
    x = fit(rows, [float(p.peak_bytes or 0) for p in chosen]).coefficients
    return dict(zip(names, x, strict=True))


def _memory_row(case: Case) -> list[float]:
    x = case.tokens / case.degree
    return [x * (case.depth - case.recompute), x * case.recompute, x, 1.0]


def _memory_error(good: Sequence[Point], memory: Mapping[str, float]) -> dict[str, float]:
    chosen = [p for p in good if p.peak_bytes]
    if not any(memory.values()):
        return {}
    x = np.array([memory[n] for n in ("kept", "checkpoint", "once", "base")])
    errors = [abs(float(x @ _memory_row(p.case)) / float(p.peak_bytes or 1) - 1) for p in chosen]
    return {"memory": float(np.median(errors))}


def group_of(case: Case) -> str:
    """The term that a case tells most about."""
    if case.degree > 1:
        return "communication"
    if case.recompute:
        return "recompute"
    return "attention" if len(case.lengths) == 1 else "linear"


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


def _errors(
    rows: Array,
    times: Array,
    plain: Sequence[Point],
    predictions: Sequence[tuple[str, float, float]],
) -> dict[str, float]:
    """Median error by term: left out one by one for the plain points, of the fit for the rest."""
    out: dict[str, list[float]] = {}
    for point, error in zip(plain, leave_one_out(rows, times), strict=True):
        out.setdefault(group_of(point.case), []).append(error)
    for group, predicted, measured in predictions:
        if group in ("recompute", "communication"):
            out.setdefault(group, []).append(abs(predicted / measured - 1.0))
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
