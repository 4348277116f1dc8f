"""Out of memory: what is told, which budget comes next, and how a restarted run learns of it.

The next budget is below what the plan expected of the microbatch that failed, because that is what
turned out not to fit; it is never below what the step's longest sample needs at its leanest, so
that the same samples can be planned again.

A run that has to end leaves the next budget in the file that MDCP_OOM_FILE names (set by
`megatron_dcp.cli.elastic`); `initialize` takes the least budget that any rank finds there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_dcp.dist import DataWorld
from megatron_dcp.plan import Placement, StepPlan
from megatron_dcp.runtime.memory import held_bytes

OOM_FILE = "MDCP_OOM_FILE"
RESTARTED = "MDCP_RESTARTED"  # set in a run that is started again after running out of memory
_SHARE_KEPT = (9, 10)  # of the activation bytes that did not fit


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that an allocation failed, on a device or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (
        "can't allocate memory" in text or "CUDA out of memory" in text
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OomReport:
    """What failed on one rank. Bytes are per rank; held: of the process or device then.

    where: the placement, or that the step was being finished. samples: data set indices.
    expected_bytes: what the plan expected of the placement; 0 outside of one.
    """

    rank: int
    step: int
    where: str
    samples: tuple[int, ...]
    lengths: tuple[int, ...]
    expected_bytes: int
    budget_bytes: int
    held: dict[str, int]
    error: str

    def text(self) -> str:
        held = ", ".join(f"{name} {n}" for name, n in self.held.items())
        expected = f"The plan expected {self.expected_bytes} bytes, the" if self.samples else "The"
        return (
            f"rank {self.rank} ran out of memory in step {self.step}, {self.where}. {expected} "
            f"budget is {self.budget_bytes} bytes; held: {held}. {self.error}"
        )


def make_report(
    world: DataWorld, plan: StepPlan, placement: Placement | None, indices: Sequence[int],
    error: BaseException,
) -> OomReport:  # fmt: skip
    """What this rank has to say of an allocation that failed in a placement, or outside of one."""
    where, chosen = "while gradients were reduced and parameters updated", placement
    if chosen is not None:
        samples = [indices[i] for i in chosen.samples]
        where = (
            f"slot {chosen.slot}, placement on data ranks {chosen.first_rank}.."
            f"{chosen.first_rank + chosen.degree - 1} ({chosen.scheme}, {chosen.recompute} of "
            f"{plan.layers} layers recomputed): data set samples {samples} of lengths "
            f"{[plan.lengths[i] for i in chosen.samples]}"
        )
    of = () if chosen is None else chosen.samples
    return OomReport(
        rank=world.rank,
        step=plan.step,
        where=where,
        samples=tuple(indices[i] for i in of),
        lengths=tuple(plan.lengths[i] for i in of),
        expected_bytes=0 if chosen is None else chosen.bytes,
        budget_bytes=plan.budget_bytes,
        held=held_bytes(world.device),
        error=str(error).split("\n", 1)[0][:500],
    )


def dump_report(report: OomReport | None) -> bytes:
    return b"" if report is None else json.dumps(asdict(report)).encode()


def load_report(data: bytes) -> OomReport | None:
    if not data:
        return None
    fields = json.loads(data)
    for name in ("samples", "lengths"):
        fields[name] = tuple(fields[name])
    return OomReport(**fields)


def smaller_budget(
    reports: Sequence[OomReport], budget: int, static: float, leanest: int
) -> int | None:
    """The next budget, bytes, or None where none below helps.

    static: bytes held outside of any microbatch. leanest: what the step's longest sample needs.
    """
    failed = min([budget, *(r.expected_bytes for r in reports if r.expected_bytes)])
    kept, whole = _SHARE_KEPT
    smaller = max(int(static + (failed - static) * kept / whole), leanest)
    return smaller if smaller < failed else None


def write_budget(budget: int, text: str) -> None:
    """Leave the next budget for the run that is started after this one."""
    name = os.environ.get(OOM_FILE)
    if not name:
        return
    path = Path(name)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    body = {"schema": "mdcp.oom/1", "budget_bytes": budget, "text": text}
    part.write_text(json.dumps(body) + "\n")
    part.replace(path)


def read_budget() -> int | None:
    """The budget that an earlier run of this job left, or None."""
    name = os.environ.get(OOM_FILE)
    try:
        body: Any = json.loads(Path(name).read_text()) if name else {}
        return int(body["budget_bytes"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def agreed_limit(world: DataWorld) -> int | None:
    """The least budget that earlier runs left on the host of any rank of any plane, or None.

    Collective over all processes.
    """
    none = torch.iinfo(torch.int64).max
    mine = read_budget()
    limit = torch.tensor([none if mine is None else mine], device=world.device)
    if len(world.planes) > 1 or world.size > 1:
        dist.all_reduce(limit, op=dist.ReduceOp.MIN)
    return None if int(limit) == none else int(limit)
