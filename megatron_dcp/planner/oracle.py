"""The readable oracle of the `dcp` planner: the same bytes as C++, in plain Python.

It exists to be read and to be compared with: `tests/property/test_planner_oracle.py` holds the
canonical bytes of both equal. Structure and names follow csrc/planner file by file (oracle_table:
table, bound; oracle_layout: layout; oracle_search: search, improve; oracle_finish: finish;
oracle_shelf: shelf; oracle_shelves: shelves); the static fallback is the strategy `static` itself.
Hundreds of times slower than C++.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_dcp.cost.profile import Overhead
from megatron_dcp.errors import PlanError
from megatron_dcp.plan import Placement, StepPlan
from megatron_dcp.planner.baselines.static import static
from megatron_dcp.planner.core import check_request
from megatron_dcp.planner.oracle_finish import close_plan, finish, price
from megatron_dcp.planner.oracle_search import Search
from megatron_dcp.planner.oracle_shelf import Singles
from megatron_dcp.planner.oracle_shelves import Shelves, lockstep_plan
from megatron_dcp.planner.oracle_table import Table, lower_bound
from megatron_dcp.planner.pricing import replayed_us
from megatron_dcp.planner.registry import Draft, PlanRequest, build_plan


def oracle_draft(request: PlanRequest, parameter: str | None = None) -> Draft:
    """The `dcp` placements. Raises PlanError when a sample fits on no block."""
    check_request(request)
    table = Table(request)
    table.require_feasible()
    found = [_searched(request, table)]
    if table.stages > 1 and request.lockstep < table.ranks:
        other = _shelves_unlocked(request, table)
        if other is not None:
            found.append(other)
    return _best(request, found)


def _searched(request: PlanRequest, table: Table) -> tuple[list[Placement], int, str]:
    """(placements, makespan, name)."""
    _, area = lower_bound(table)
    search = Search(table)
    shelves = None
    if request.lockstep > 1:
        shelves = lockstep_plan(table, search, area)
        if shelves is not None and request.lockstep == table.ranks:
            return shelves
    chosen, layouts = search.layouts(area)
    blocks, name = search.complete(chosen, layouts[0])
    placements, makespan = finish(table, blocks)
    for layout in layouts[1:]:
        blocks, _ = search.complete(chosen, layout)
        other, ends = finish(table, blocks)
        if ends < makespan:
            placements, makespan = other, ends
    if shelves is not None and shelves[1] < makespan:
        return shelves
    return placements, makespan, name


def _shelves_unlocked(
    request: PlanRequest, table: Table
) -> tuple[list[Placement], int, str] | None:
    """Shelves on all ranks, run without their waits: pipelines, see csrc/planner/search.cc."""
    profile = request.profile
    if request.lockstep == 1:
        o = profile.overhead_us.async_
        profile = replace(profile, overhead_us=Overhead(async_=o, lockstep=o))
    tied = Table(replace(request, lockstep=table.ranks, profile=profile))
    order = Search(tied).order
    found = Shelves(tied, Singles(tied), 0, table.ranks).run(list(order), 0)
    if found is None:
        return None
    if request.lockstep == 1:
        for i, p in enumerate(found):
            q = price(table, p.first_rank, p.degree, -1, list(p.samples))
            assert q is not None, "a placement that fits fits with its own least recompute"
            found[i] = replace(q, slot=p.slot)
    return (*close_plan(table, found), "shelves")


def _best(request: PlanRequest, found: list[tuple[list[Placement], int, str]]) -> Draft:
    """The fastest that is never_slower_than_static, as plans state it (without dummies); the static
    plan where it is faster than all."""
    try:
        draft = static(request, None)
    except PlanError:  # the longest sample fits no static degree
        limit = None
    else:
        limit = replayed_us(request, draft.placements, dummies=False)
        us = replayed_us(request, draft.placements)
        found = [*found, (list(draft.placements), us, draft.algorithm)]
    allowed = [
        x for x in found
        if limit is None or replayed_us(request, x[0], dummies=False) <= limit
    ]  # fmt: skip
    placements, _, name = min(allowed, key=lambda x: x[1])
    return Draft(placements=placements, algorithm=name)


def oracle_bound_us(request: PlanRequest) -> int:
    """The lower bound, in Python."""
    check_request(request)
    table = Table(request)
    table.require_feasible()
    return lower_bound(table)[0]


def oracle_plan(request: PlanRequest) -> StepPlan:
    """The oracle's StepPlan, checked, under the name `dcp`."""
    return build_plan(request, "dcp", oracle_draft, oracle_bound_us, None)
