"""Order in which one pipeline stage runs the forwards and backwards of a step.

1F1B: stage s of p runs min(p - 1 - s, m) forwards, then one forward and one backward in turn, then
the remaining backwards. Interleaved (v chunks of layers per stage, Megatron's order): microbatches
go in groups of p through chunk 0, then chunk 1, ...; 2 (p - 1 - s) + (v - 1) p forwards come first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_dcp.errors import PlanError


@dataclass(frozen=True, slots=True)
class Op:
    """One forward or backward of one microbatch through one chunk (0..p*v-1, in model order)."""

    microbatch: int
    chunk: int
    backward: bool


def stage_order(stage: int, stages: int, microbatches: int, virtual: int = 1) -> list[Op]:
    """The operations of one stage, in order. Raises PlanError where interleaving cannot divide."""
    if virtual > 1 and microbatches % stages:
        raise PlanError(
            f"interleaved pipeline: {microbatches} slots over {stages} stages; the number of slots "
            "must be a multiple of the stages (dummies fill the rest)"
        )
    total = microbatches * virtual
    if virtual == 1:
        warm = min(stages - 1 - stage, total)
    else:
        warm = min(2 * (stages - 1 - stage) + (virtual - 1) * stages, total)
    forward = _walk(stage, stages, virtual, total, backward=False)
    backward = _walk(stage, stages, virtual, total, backward=True)
    order = [next(forward) for _ in range(warm)]
    for _ in range(total - warm):
        order.append(next(forward))
        order.append(next(backward))
    order.extend(backward)
    return order


def _walk(stage: int, stages: int, virtual: int, total: int, *, backward: bool) -> Iterator[Op]:
    for k in range(total):
        if virtual == 1:
            yield Op(k, stage, backward)
            continue
        group, inside = divmod(k, stages * virtual)
        local = inside // stages
        if backward:
            local = virtual - 1 - local
        yield Op(group * stages + inside % stages, local * stages + stage, backward)
