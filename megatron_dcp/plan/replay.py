"""Makespan of a plan by replay, and the idle share: integers only.

Async (lockstep domain of 1 rank): a placement starts at the latest finish of the ranks of its block
and ends after its time. Lockstep: every rank of a domain leaves a slot when the slowest placement
of the domains that the slot couples has ended.

With p pipeline stages times are per stage and (p - 1) times the largest placement time is added.
Every rank then runs the same number of microbatches (`StepPlan.microbatches`), a dummy in each slot
in which it has no placement, as 1F1B meets by position. A plan's makespan leaves dummies out;
planners pass `dummy_us` to count them.

Placements of a fused group (one slot, `fused`, nested blocks) run in one forward: the group starts
at the latest finish of its ranks, and each rank spends the sum of the placements that hold it, the
overhead being counted once by whoever priced them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_dcp.plan.types import Placement, StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """When one rank runs one placement, in us from the start of the step."""

    rank: int
    placement: int  # index into plan.placements
    start_us: int
    end_us: int


def execution_order(placements: Sequence[Placement]) -> list[int]:
    """Indices of placements in the order every rank runs its own: (slot, first_rank, -degree)."""
    return sorted(range(len(placements)), key=lambda i: placements[i].order)


def timeline(plan: StepPlan, dummy_us: int = 0) -> list[Interval]:
    """Every (rank, placement) with its start and end, in execution order; no pipeline term.

    dummy_us: what a rank spends in each slot without a placement.
    """
    n, domain = plan.topology.data_ranks, plan.lockstep
    free = [0] * n
    ran = [0] * n  # slots behind each rank
    out: list[Interval] = []
    slot_open: int | None = None
    for i in execution_order(plan.placements):
        p = plan.placements[i]
        if p.slot != slot_open:
            if dummy_us:
                free = [f + (p.slot - k) * dummy_us for f, k in zip(free, ran, strict=True)]
                ran = [p.slot] * n
            if domain > 1:
                _close_slot(free, domain)
            slot_open = p.slot
        start = max(free[r] for r in p.ranks)
        for r in p.ranks:
            free[r] = start + p.time_us
            ran[r] = p.slot + 1
            out.append(Interval(rank=r, placement=i, start_us=start, end_us=start + p.time_us))
    return out


def _close_slot(free: list[int], domain: int) -> None:
    """All ranks of a domain wait for the slowest of it."""
    for first in range(0, len(free), domain):
        latest = max(free[first : first + domain])
        free[first : first + domain] = [latest] * domain


def makespan_us(plan: StepPlan, dummy_us: int = 0) -> int:
    """Predicted forward + backward time of the step. dummy_us: as in `timeline`, for pipelines."""
    count = plan.microbatches
    ends = [count * dummy_us] * plan.topology.data_ranks
    for x in timeline(plan, dummy_us):
        after = count - plan.placements[x.placement].slot - 1
        ends[x.rank] = x.end_us + after * dummy_us
    return max(ends) + pipeline_us(plan)


def pipeline_us(plan: StepPlan) -> int:
    """What filling and draining the pipeline adds: (p - 1) * the largest placement time."""
    largest = max((p.time_us for p in plan.placements), default=0)
    return (plan.topology.pipeline_stages - 1) * largest


def busy_us(plan: StepPlan) -> int:
    """Rank-time spent in placements, summed over ranks."""
    return sum(p.time_us * p.degree for p in plan.placements)


def idle_share(plan: StepPlan) -> float:
    """1 - busy rank-time / (N * makespan): a fraction of rank-time."""
    span = plan.makespan_us * plan.topology.data_ranks
    return 1.0 - busy_us(plan) / span if span else 0.0
