"""What `mdcp profile` measures: the grid of cases, the points, what out of memory rules out.

No torch: `runtime/profile.py` runs the cases, `cost/profiling.py` fits the points.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_dcp.cost.model import Mode
from megatron_dcp.errors import ConfigError


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

    modes: degree -> schemes to measure. Recompute of all layers is measured at degree 1, at the
    larger depth, in packs of at least a quarter of max_tokens: plans recompute where memory is
    full. Schemes are measured at the larger depth.
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
    recomputed = [*packs[2:5], *packs[-4:]]
    cases += [Case(depth=large, lengths=p, recompute=large) for p in recomputed]
    shared = [packs[1], packs[3], packs[4], packs[-1]]
    for degree, schemes in modes.items():
        for mode in schemes:
            for p in shared:
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


def group_of(case: Case) -> str:
    """The term that a case tells most about."""
    if case.degree > 1:
        return "communication"
    if case.recompute:
        return "recompute"
    return "attention" if len(case.lengths) == 1 else "linear"
