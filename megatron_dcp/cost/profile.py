"""The cost profile: `mdcp.cost/1` JSON as a frozen dataclass, checked for schema and ranges.

Numbers keep the type that they have in the file (1 stays 1, 0.5 stays 0.5), because the digest is
taken over the JSON text: the first 64 bits of the SHA-256 of the profile without `fingerprint` and
`fit`, keys sorted, no spaces, floats as Python `repr`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_dcp.errors import ConfigError
from megatron_dcp.plan import CostRef, HeadLimits

SCHEMA = "mdcp.cost/1"
PAIRS = ("causal", "full", "grid")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What the formulas need of a transformer. element_bytes: bytes of one activation element."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int
    element_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One row of the link table: serves degrees up to max_degree (the last row serves the rest)."""

    max_degree: int
    us_per_byte: float
    latency_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeFraction:
    """Extra time when all layers are recomputed, as a fraction of each term."""

    linear: float = 0.333
    attention: float = 0.333
    comm: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Fixed time per microbatch, us."""

    # `async` is a Python keyword; the JSON key stays `async`.
    async_: float = 0.0
    lockstep: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Share of the attention time under which a scheme hides its communication, 0..1."""

    ring: float = 0.0
    ulysses: float = 0.0
    allgather: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CostProfile:
    """Coefficients of the time and memory model (units in the field names)."""

    name: str
    model: ModelShape
    pairs: str = "causal"
    linear_us_per_token: float = 0.0
    attn_us_per_pair: float = 0.0
    attn_spatial_us_per_pair: float = 0.0
    attn_temporal_us_per_pair: float = 0.0
    linear_half_tokens: float = 0
    attn_half_tokens: float = 0
    recompute_fraction: RecomputeFraction = field(default_factory=RecomputeFraction)
    overhead_us: Overhead = field(default_factory=Overhead)
    links: tuple[Link, ...] = ()
    overlap: Overlap = field(default_factory=Overlap)
    comm_bytes_per_token_layer: float | None = None
    static_bytes: float = 0
    kept_bytes_per_token_layer: float = 0
    checkpoint_bytes_per_token_layer: float = 0
    working_bytes_per_token: float = 0
    head_bytes_per_token: float = 0
    budget_bytes: int = 0
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    fit: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "links", tuple(self.links))
        _check_ranges(self)

    @property
    def head_limits(self) -> HeadLimits:
        """Profiles with a comm term of their own (a100-gpt7b) put no head limit on Ulysses."""
        return HeadLimits(
            heads=self.model.heads,
            kv_heads=self.model.kv_heads,
            free=self.comm_bytes_per_token_layer is not None,
        )

    @property
    def ref(self) -> CostRef:
        return CostRef(name=self.name, digest=digest(self))

    def link(self, degree: int) -> Link:
        """The row for a degree: the first with max_degree >= degree, else the last."""
        for row in self.links:
            if row.max_degree >= degree:
                return row
        return self.links[-1]

    def with_budget(self, budget_bytes: int) -> CostProfile:
        return dataclasses.replace(self, budget_bytes=budget_bytes)


_NON_NEGATIVE = (
    "linear_us_per_token", "attn_us_per_pair", "attn_spatial_us_per_pair",
    "attn_temporal_us_per_pair", "linear_half_tokens", "attn_half_tokens", "static_bytes",
    "kept_bytes_per_token_layer", "checkpoint_bytes_per_token_layer", "working_bytes_per_token",
    "head_bytes_per_token",
)  # fmt: skip


# Above these a coefficient is a mistake, and products of them would leave 64 bits.
_MOST = 1e15
_MOST_INT = {"hidden": 2**31 - 1, "vocab": 2**31 - 1, "element_bytes": 16}
_MOST_SHAPE = 2**20  # layers, heads, head_dim
_NUMBER = f"a number in 0..{_MOST:g}"


def budget_bytes(gigabytes: float) -> int:
    """Bytes of a memory budget given in 1e9 bytes; raises ConfigError unless in 0..1e6, above 0."""
    if not 0 < gigabytes <= 1e6:
        raise ConfigError(
            f"memory of {gigabytes} GB: the budget of one rank is above 0 and at most 1e6 "
            "(1e9 bytes each)"
        )
    return round(gigabytes * 1e9)


def _number(value: Any) -> bool:
    """A number up to _MOST (which a NaN and infinity are not)."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value <= _MOST


def _integer(value: Any, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _require(ok: bool, name: str, key: str, found: Any, want: str) -> None:
    if not ok:
        shown = repr(found)
        shown = shown if len(shown) <= 40 else f"{shown[:40]}... ({len(shown)} characters)"
        raise ConfigError(f"cost profile {name!r}: {key} is {shown}, it must be {want}")


def _check_ranges(p: CostProfile) -> None:
    _require(_encodable(p.name), p.name, "name", p.name, "text without lone surrogates")
    _require(p.pairs in PAIRS, p.name, "pairs", p.pairs, f"one of {', '.join(PAIRS)}")
    for key in _NON_NEGATIVE:
        value = getattr(p, key)
        _require(_number(value) and value >= 0, p.name, key, value, _NUMBER)
    budget = p.budget_bytes
    ok = isinstance(budget, int) and _number(budget) and budget >= 0
    _require(ok, p.name, "budget_bytes", budget, f"an integer in 0..{_MOST:g}")
    for f in dataclasses.fields(p.model):
        value, most = getattr(p.model, f.name), _MOST_INT.get(f.name, _MOST_SHAPE)
        ok = _integer(value, most)
        _require(ok, p.name, f"model.{f.name}", value, f"an integer in 1..{most}")
    h, hk = p.model.heads, p.model.kv_heads
    _require(h % hk == 0, p.name, "model.kv_heads", hk, f"a divisor of heads ({h})")
    for group in (p.recompute_fraction, p.overhead_us):
        for f in dataclasses.fields(group):
            value = getattr(group, f.name)
            _require(_number(value) and value >= 0, p.name, f.name, value, _NUMBER)
    for f in dataclasses.fields(p.overlap):
        value = getattr(p.overlap, f.name)
        _require(_number(value) and 0 <= value <= 1, p.name, f"overlap.{f.name}", value, "in 0..1")
    _require(bool(p.links), p.name, "links", [], "a list of at least one link")
    for i, row in enumerate(p.links):
        ok = _integer(row.max_degree, 2**31 - 1)
        _require(ok, p.name, f"links[{i}].max_degree", row.max_degree, "an integer in 1..2^31-1")
        if i:
            _require(
                row.max_degree > p.links[i - 1].max_degree,
                p.name,
                f"links[{i}].max_degree",
                row.max_degree,
                f"larger than the row before ({p.links[i - 1].max_degree})",
            )
        for key in ("us_per_byte", "latency_us"):
            value = getattr(row, key)
            _require(_number(value) and value >= 0, p.name, f"links[{i}].{key}", value, _NUMBER)
    comm = p.comm_bytes_per_token_layer
    if comm is not None:
        _require(_number(comm) and comm >= 0, p.name, "comm_bytes_per_token_layer", comm, _NUMBER)


def to_object(profile: CostProfile) -> dict[str, Any]:
    """The profile as plain JSON types."""
    body = dataclasses.asdict(profile)
    body["overhead_us"] = {
        "async": profile.overhead_us.async_,
        "lockstep": profile.overhead_us.lockstep,
    }
    body["links"] = list(body["links"])
    return {"schema": SCHEMA, **body}


def digest(profile: CostProfile) -> str:
    """16 hex digits over everything but `fingerprint` and `fit`."""
    body = to_object(profile)
    del body["fingerprint"], body["fit"]
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def dumps(profile: CostProfile) -> str:
    """The profile file's text, indented for people."""
    return json.dumps(to_object(profile), indent=2, ensure_ascii=False) + "\n"


def _build(cls: Any, obj: Any, where: str, rename: Mapping[str, str] | None = None) -> Any:
    if not isinstance(obj, dict):
        raise ConfigError(f"{where} must be an object, found {type(obj).__name__}")
    back = {field: key for key, field in (rename or {}).items()}
    renamed = {(rename or {}).get(k, k): v for k, v in obj.items() if k not in back}
    names = {f.name for f in dataclasses.fields(cls)}
    needed = {
        f.name
        for f in dataclasses.fields(cls)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    unknown = sorted((set(renamed) - names) | (set(obj) & set(back)))
    missing = sorted(needed - set(renamed))
    if unknown or missing:
        known = sorted(back.get(name, name) for name in names)
        raise ConfigError(
            f"{where}: missing keys {missing}, unknown keys {unknown}; known are {known}"
        )
    return cls(**renamed)


def from_object(obj: Any, where: str = "cost profile") -> CostProfile:
    """Read a profile object strictly: schema, keys, types and ranges."""
    if not isinstance(obj, dict) or obj.get("schema") != SCHEMA:
        found = obj.get("schema") if isinstance(obj, dict) else type(obj).__name__
        raise ConfigError(f"{where}: schema {found!r} found, this version reads {SCHEMA!r}")
    body = {k: v for k, v in obj.items() if k != "schema"}
    parts = {
        "model": (ModelShape, None),
        "recompute_fraction": (RecomputeFraction, None),
        "overhead_us": (Overhead, {"async": "async_"}),
        "overlap": (Overlap, None),
    }
    for key, (cls, rename) in parts.items():
        if key in body:
            body[key] = _build(cls, body[key], f"{where}.{key}", rename)
    links = body.get("links", [])
    if not isinstance(links, list):
        raise ConfigError(f"{where}.links must be a list, found {type(links).__name__}")
    body["links"] = tuple(_build(Link, x, f"{where}.links[{i}]") for i, x in enumerate(links))
    for key in ("fingerprint", "fit"):
        if not isinstance(body.get(key, {}), dict):
            raise ConfigError(f"{where}.{key} must be an object, found {body[key]!r}")
    if not isinstance(body.get("name", ""), str):
        raise ConfigError(f"{where}.name must be a string, found {body['name']!r}")
    profile: CostProfile = _build(CostProfile, body, where)
    return profile


def load(path: str | Path) -> CostProfile:
    """Read a profile file; every fault is a ConfigError that names the file."""
    try:
        obj = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read cost profile {str(path)!r}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not a cost profile: {error}") from error
    return from_object(obj, str(path))
