"""Which microbatches one data rank runs, in order: placements, and dummies where it must wait.

* Async (one stage, lockstep 1): a rank runs its placements and nothing else; one dummy when it has
  none, because gradient buckets are reduced by the last backward.
* Lockstep domains (MoE: the EP group): every rank of a domain runs each slot that its domain uses.
  Experts are reached again by recomputation, so ranks that meet in a slot, by a domain or by a
  placement, recompute alike: as many layers as the most that any of their placements asks for.
* Pipelines: 1F1B interleaves forwards and backwards by position. Two ranks that share a placement
  must have it at the same position, or one waits in a forward for a rank that waits in a backward.
  So every rank runs every slot, dummies filling the holes, and with interleaving the count is
  rounded up to a multiple of the stages. The plan's makespan counts these dummies.

No torch: this is arithmetic on a plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_dcp.plan import Placement, StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One microbatch of one rank. index: its placement in the plan, None for a dummy."""

    index: int | None
    recompute: int = 0
    recompute_kind: str = "layers"


def _tied(plan: StepPlan, placements: Iterable[Placement], rank: int) -> set[int]:
    """Data ranks tied to `rank` by some placements and by the lockstep domains."""
    groups = [set(p.ranks) for p in placements if p.degree > 1]
    n = plan.topology.data_ranks
    groups += [set(range(d, d + plan.lockstep)) for d in range(0, n, plan.lockstep)]
    tied, grown = {rank}, True
    while grown:
        grown = False
        for group in groups:
            if tied & group and not group <= tied:
                tied |= group
                grown = True
    return tied


def _slot(plan: StepPlan, rank: int, slot: int, index: int | None) -> Slot:
    """A microbatch with the recomputation that its neighbours of the slot share."""
    if plan.lockstep == 1:
        if index is None:
            return Slot(index=None)
        p = plan.placements[index]
        return Slot(index=index, recompute=p.recompute, recompute_kind=p.recompute_kind)
    here = [p for p in plan.placements if p.slot == slot]
    tied = _tied(plan, here, rank)
    met = [p for p in here if tied & set(p.ranks)]
    most = max(met, key=lambda p: (p.recompute_kind == "layers", p.recompute), default=None)
    if most is None:
        return Slot(index=index)
    return Slot(index=index, recompute=most.recompute, recompute_kind=most.recompute_kind)


def rank_slots(plan: StepPlan, rank: int) -> list[Slot]:
    """The microbatches of a data rank; never empty."""
    first = rank - rank % plan.lockstep
    domain = set(range(first, first + plan.lockstep))
    used: set[int] = set()
    mine: dict[int, int] = {}
    for index, p in enumerate(plan.placements):
        if rank in p.ranks:
            mine[p.slot] = index
        if not domain.isdisjoint(p.ranks):
            used.add(p.slot)
    if plan.topology.pipeline_stages > 1:
        used = set(range(plan.microbatches))
    return [_slot(plan, rank, s, mine.get(s)) for s in sorted(used)] or [Slot(index=None)]
