"""The one wire form of a plan: `mdcp.plan/1` JSON, its canonical bytes and its digest.

Canonical bytes: the object without `digest` and `info`, UTF-8, keys sorted, no spaces, integers
only. The digest is the first 64 bits of their SHA-256 as 16 hex digits. Readers accept unknown keys
inside `info` only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_dcp.errors import ConfigError, PlanError
from megatron_dcp.plan.types import CostRef, Placement, StepPlan, Topology, Workload

SCHEMA = "mdcp.plan/1"

_TOP = {
    "schema": str,
    "step": int,
    "strategy": str,
    "algorithm": str,
    "topology": dict,
    "lockstep": int,
    "cost": dict,
    "budget_bytes": int,
    "layers": int,
    "lengths": list,
    "shapes": (list, type(None)),
    "placements": list,
    "makespan_us": int,
    "lower_bound_us": int,
}
_TOPOLOGY = {
    "data_ranks": int,
    "ranks_per_node": int,
    "pipeline_stages": int,
    "virtual_stages": int,
    "speed": (list, type(None)),
}
_PLACEMENT = {
    "slot": int,
    "first_rank": int,
    "degree": int,
    "scheme": str,
    "inner_degree": int,
    "recompute": int,
    "recompute_kind": str,
    "fused": bool,
    "samples": list,
    "time_us": int,
    "bytes": int,
}


def _placement_object(p: Placement) -> dict[str, Any]:
    return {
        "slot": p.slot,
        "first_rank": p.first_rank,
        "degree": p.degree,
        "scheme": p.scheme,
        "inner_degree": p.inner_degree,
        "recompute": p.recompute,
        "recompute_kind": p.recompute_kind,
        "fused": p.fused,
        "samples": list(p.samples),
        "time_us": p.time_us,
        "bytes": p.bytes,
    }


def to_object(plan: StepPlan, *, canonical: bool = False) -> dict[str, Any]:
    """The plan as plain JSON types; `canonical` leaves out `digest` and `info`."""
    t = plan.topology
    shapes = plan.workload.shapes
    body: dict[str, Any] = {
        "schema": SCHEMA,
        "step": plan.step,
        "strategy": plan.strategy,
        "algorithm": plan.algorithm,
        "topology": {
            "data_ranks": t.data_ranks,
            "ranks_per_node": t.ranks_per_node,
            "pipeline_stages": t.pipeline_stages,
            "virtual_stages": t.virtual_stages,
            "speed": None if t.speed is None else list(t.speed),
        },
        "lockstep": plan.lockstep,
        "cost": {"name": plan.cost.name, "digest": plan.cost.digest},
        "budget_bytes": plan.budget_bytes,
        "layers": plan.layers,
        "lengths": list(plan.workload.lengths),
        "shapes": None if shapes is None else [list(s) for s in shapes],
        "placements": [_placement_object(p) for p in plan.placements],
        "makespan_us": plan.makespan_us,
        "lower_bound_us": plan.lower_bound_us,
    }
    if canonical:
        return body
    return {"digest": digest(plan), **body, "info": dict(plan.info)}


def canonical_bytes(plan: StepPlan) -> bytes:
    """The bytes that all ranks must agree on."""
    body = to_object(plan, canonical=True)
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def digest(plan: StepPlan) -> str:
    """16 hex digits: the first 64 bits of the SHA-256 of the canonical bytes."""
    return hashlib.sha256(canonical_bytes(plan)).hexdigest()[:16]


def dumps(plan: StepPlan) -> str:
    """The plan file's text: the canonical object plus `digest` and `info`."""
    return json.dumps(to_object(plan), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _typed(value: Any, kind: Any) -> bool:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, kinds)


def _in_range(value: int, where: str) -> None:
    """Every integer of a plan counts something, and must fit the planner's 64 bits."""
    if not 0 <= value <= 2**62:
        raise PlanError(f"{where}: found {value}, expected 0..2^62")


def _encodable(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PlanError(f"{where}: found {text!r}, which is no UTF-8 text") from None


def _checked(
    obj: Any, fields: Mapping[str, Any], where: str, optional: tuple[str, ...] = ()
) -> None:
    if not isinstance(obj, dict):
        raise PlanError(f"{where} must be an object, found {type(obj).__name__}")
    unknown = sorted(set(obj) - set(fields) - set(optional))
    missing = sorted(set(fields) - set(obj))
    if unknown or missing:
        raise PlanError(
            f"{where}: missing keys {missing}, unknown keys {unknown}; "
            f"a {SCHEMA} file has exactly {sorted(fields)} (unknown keys only inside info)"
        )
    for key, kind in fields.items():
        if not _typed(obj[key], kind):
            raise PlanError(f"{where}.{key}: found {obj[key]!r}, of the wrong type")
        if kind is int:
            _in_range(obj[key], f"{where}.{key}")
        if kind is str and not obj[key].isascii():
            _encodable(obj[key], f"{where}.{key}")


def _integers(values: list[Any], where: str) -> list[int]:
    for i, v in enumerate(values):
        if not _typed(v, int):
            raise PlanError(f"{where}[{i}]: found {v!r}, expected an integer")
        _in_range(v, f"{where}[{i}]")
    return values


def from_object(obj: Any) -> StepPlan:
    """Read a plan object strictly; the digest, when present, must match."""
    if isinstance(obj, dict) and obj.get("schema") != SCHEMA:
        raise PlanError(f"schema: found {obj.get('schema')!r}, this version reads {SCHEMA!r}")
    _checked(obj, _TOP, "plan", optional=("digest", "info"))
    topo = obj["topology"]
    _checked(topo, _TOPOLOGY, "topology")
    _integers(topo["speed"] or [], "topology.speed")
    _checked(obj["cost"], {"name": str, "digest": str}, "cost")
    info = obj.get("info", {})
    if not isinstance(info, dict):
        raise PlanError(f"plan.info must be an object, found {type(info).__name__}")
    placements = []
    for i, p in enumerate(obj["placements"]):
        _checked(p, _PLACEMENT, f"placements[{i}]")
        _integers(p["samples"], f"placements[{i}].samples")
        placements.append(Placement(**{**p, "samples": tuple(p["samples"])}))
    shapes = obj["shapes"]
    if shapes is not None:
        for i, s in enumerate(shapes):
            if not isinstance(s, list) or len(s) != 3:
                raise PlanError(f"shapes[{i}]: found {s!r}, expected [frames, height, width]")
            _integers(s, f"shapes[{i}]")
    _integers(obj["lengths"], "lengths")
    try:
        plan = StepPlan(
            strategy=obj["strategy"],
            algorithm=obj["algorithm"],
            topology=Topology(**topo),
            lockstep=obj["lockstep"],
            cost=CostRef(**obj["cost"]),
            budget_bytes=obj["budget_bytes"],
            layers=obj["layers"],
            workload=Workload(lengths=obj["lengths"], shapes=shapes),
            placements=tuple(placements),
            makespan_us=obj["makespan_us"],
            lower_bound_us=obj["lower_bound_us"],
            step=obj["step"],
            info=info,
        )
    except ConfigError as error:
        raise PlanError(f"plan file: {error}") from error
    if "digest" in obj and obj["digest"] != digest(plan):
        raise PlanError(
            f"digest: the file says {obj['digest']!r}, its content has {digest(plan)!r}; "
            "the file was changed or damaged: make the plan again",
        )
    return plan


def loads(text: str | bytes) -> StepPlan:
    """Read a plan file's text; every fault is a PlanError that says where it is."""
    try:
        obj = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"not a plan file: {error}") from error
    return from_object(obj)


def load(path: str | Path) -> StepPlan:
    """Read a plan file."""
    try:
        return loads(Path(path).read_bytes())
    except OSError as error:
        raise PlanError(f"cannot read plan file {str(path)!r}: {error.strerror}") from error
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error
