"""What one rank runs in a step, in order: its placements, and dummies where the backend needs them.

Lockstep: a rank of a domain runs one microbatch in every slot that the domain uses; where it has no
placement it runs a dummy of one token. Async: only its placements, and at least `min_microbatches`.
Pipeline stages: every rank runs every slot of the step (`StepPlan.microbatches`), by dummies too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_dcp.plan import Placement, StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One microbatch of a rank; a dummy's placement is this rank alone, without samples.

    closing: the dummy that ends a step, for wrappers that reduce in it.
    """

    placement: Placement
    dummy: bool = False
    closing: bool = False


def rank_schedule(
    plan: StepPlan, rank: int, *, min_microbatches: int = 0, closing_dummy: bool = False
) -> list[Work]:
    """The microbatches of one data rank in the order in which it runs them."""
    work = _schedule(plan, rank, min_microbatches)
    if closing_dummy:
        work.append(replace(_dummy(rank, plan.slots + len(work), None), closing=True))
    return work


def _schedule(plan: StepPlan, rank: int, min_microbatches: int) -> list[Work]:
    domain = range(
        rank // plan.lockstep * plan.lockstep, (rank // plan.lockstep + 1) * plan.lockstep
    )
    of_slot: dict[int, Placement] = {}
    for p in plan.placements:
        if p.first_rank < domain.stop and p.first_rank + p.degree > domain.start:
            of_slot.setdefault(p.slot, p)
    mine: dict[int, list[Placement]] = {}
    for p in plan.of_rank(rank):
        mine.setdefault(p.slot, []).append(p)
    pipelined = plan.topology.pipeline_stages > 1
    work = []
    for slot in range(plan.microbatches) if pipelined else sorted(of_slot):
        if slot in mine:
            work += [Work(placement=p) for p in mine[slot]]
        else:
            work.append(_dummy(rank, slot, of_slot.get(slot)))
    while len(work) < min_microbatches:
        work.append(_dummy(rank, plan.slots + len(work), None))
    return work


def _dummy(rank: int, slot: int, like: Placement | None) -> Work:
    """A dummy recomputes as the placements of its slot do (ZeRO-3: one value per slot)."""
    placement = Placement(
        slot=slot,
        first_rank=rank,
        degree=1,
        samples=(),
        recompute=like.recompute if like else 0,
        recompute_kind=like.recompute_kind if like else "layers",
    )
    return Work(placement=placement, dummy=True)


def group_blocks(plan: StepPlan) -> list[tuple[int, int]]:
    """All-to-all groups that a plan needs, in plan order: (first data rank, ranks)."""
    blocks: dict[tuple[int, int], None] = {}
    for p in plan.placements:
        if p.inner_degree > 1:
            for member in range(p.degree // p.inner_degree):
                blocks[(p.first_rank + member * p.inner_degree, p.inner_degree)] = None
    return list(blocks)
