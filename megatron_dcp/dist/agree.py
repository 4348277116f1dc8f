"""Agreement on a step before its first collective: digests, the loss denominator, trouble.

One small all-gather of int64 rows per step: [plan digest, local loss weight (float64 bits), trouble
flag, digest of the data set indices]. If plan digests differ, the canonical bytes of all plans are gathered and every rank raises the
same AgreementError, which names the ranks that differ from the majority and the first field in
which they do. If a rank is in trouble (it could not read a sample, could not plan) all ranks raise.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from megatron_dcp.dist.world import DataWorld
from megatron_dcp.errors import AgreementError
from megatron_dcp.plan import StepPlan, canonical_bytes, digest
from megatron_dcp.plan.diff import first_object_difference

_NO_PLAN = 0


def _as_int64(hex_digits: str) -> int:
    return int(struct.unpack(">q", bytes.fromhex(hex_digits))[0])


def _float_bits(value: float) -> int:
    return int(struct.unpack(">q", struct.pack(">d", value))[0])


def _indices_digest(indices: Sequence[int]) -> int:
    text = ",".join(map(str, indices)).encode()
    return int(struct.unpack(">q", hashlib.sha256(text).digest()[:8])[0])


def _bits_float(value: int) -> float:
    return float(struct.unpack(">d", struct.pack(">q", value))[0])


def gather_bytes(world: DataWorld, payload: bytes, *, everyone: bool = False) -> list[bytes]:
    """The bytes of every data rank, or of every process of all planes; sizes may differ. Collective."""
    group = world.everyone if everyone else world.group if world.size > 1 else None
    if group is None:
        return [payload]
    size = torch.tensor([len(payload)], dtype=torch.int64, device=world.device)
    sizes = world.wire.all_gather_rows(size, group, "agree")[:, 0].tolist()
    padded = torch.zeros(max(max(sizes), 1), dtype=torch.uint8, device=world.device)
    if payload:
        mine = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        padded[: len(payload)] = mine.to(world.device)
    rows = world.wire.all_gather_rows(padded, group, "agree").cpu()
    return [bytes(rows[r, :n].tolist()) for r, n in enumerate(sizes)]


def agree(
    world: DataWorld,
    plan: StepPlan | None,
    weight: float,
    trouble: str | None = None,
    indices: Sequence[int] = (),
) -> float:
    """Compare plans and sum loss weights over the data ranks; returns the sum. Collective.

    With several planes (TP, PP) the plans of all processes are compared, and trouble anywhere stops
    all of them; ranks in messages are then global ones.

    trouble: why this rank cannot run the step, or None. `plan` may be None only with trouble.
    indices: which items of the data set the samples are.
    Raises AgreementError on every rank alike.
    """
    if world.everyone is None:
        if trouble is not None:
            raise AgreementError(trouble, everyone=True)
        return weight
    code = _NO_PLAN if plan is None else _as_int64(digest(plan))
    row = torch.tensor(
        [code, _float_bits(weight), int(trouble is not None), _indices_digest(indices)],
        dtype=torch.int64,
    ).to(world.device)
    rows = world.wire.all_gather_rows(row, world.everyone, "agree").tolist()
    troubled = [r for r, x in enumerate(rows) if x[2]]
    if troubled:
        texts = gather_bytes(world, (trouble or "").encode(), everyone=True)
        lines = [f"rank {r}: {texts[r].decode()}" for r in troubled]
        raise AgreementError(
            "the step cannot start; no rank has begun it. " + "; ".join(lines),
            everyone=len(troubled) == len(rows),
        )
    if len({x[0] for x in rows}) > 1:
        assert plan is not None
        _raise_difference(world, plan, [x[0] for x in rows])
    if len({x[3] for x in rows}) > 1:
        common = Counter(x[3] for x in rows).most_common(1)[0][0]
        odd = [r for r, x in enumerate(rows) if x[3] != common]
        raise AgreementError(
            f"ranks {odd} drew other samples of the data set than the rest, with equal lengths; use "
            "the same data set, order, seed and global_batch_size on all ranks"
        )
    plane = rows if len(world.planes) == 1 else [rows[g] for g in world.global_ranks]
    return sum(_bits_float(x[1]) for x in plane)


def _raise_difference(world: DataWorld, plan: StepPlan, codes: list[int]) -> None:
    """All ranks say the same: who differs from the majority, and where first."""
    bodies = [_parse(b) for b in gather_bytes(world, canonical_bytes(plan), everyone=True)]
    # Most common digest; ties go to the one of the lowest rank, alike on all ranks.
    counts = Counter(codes)
    common = max(counts, key=lambda c: (counts[c], -codes.index(c)))
    reference = codes.index(common)
    lines = [
        f"rank {r}: {first_object_difference(bodies[reference], bodies[r])}"
        for r, c in enumerate(codes)
        if c != common
    ]
    raise AgreementError(
        f"step {plan.step}: ranks hold different plans, found before any collective of the step. "
        f"Compared with rank {reference} (left), {'; '.join(lines)}. Plans are a function of "
        "lengths, topology, cost profile and options: make these equal on all ranks."
    )


def _parse(payload: bytes) -> Any:
    return json.loads(payload)
