"""The readable oracle of the `dcp` planner: the same bytes as C++, in plain Python.

It exists to be read and to be compared with: `tests/property/test_planner_oracle.py` holds the
canonical bytes of both equal. Structure and names follow csrc/planner file by file (oracle_table:
table, bound; oracle_layout: layout; oracle_search: search, improve; oracle_finish: finish;
oracle_shelf: shelf; oracle_shelves: shelves); the static fallback is the strategy `static` itself.
Hundreds of times slower than C++.
"""

from __future__ import annotations

from megatron_dcp.errors import PlanError
from megatron_dcp.plan import Placement, StepPlan
from megatron_dcp.planner.baselines.static import static
from megatron_dcp.planner.core import check_request
from megatron_dcp.planner.oracle_finish import finish
from megatron_dcp.planner.oracle_search import Search
from megatron_dcp.planner.oracle_shelves import lockstep_plan
from megatron_dcp.planner.oracle_table import Table, lower_bound
from megatron_dcp.planner.pricing import replayed_us
from megatron_dcp.planner.registry import Draft, PlanRequest, build_plan


def oracle_draft(request: PlanRequest, parameter: str | None = None) -> Draft:
    """The `dcp` placements. Raises PlanError when a sample fits on no block."""
    check_request(request)
    table = Table(request)
    table.require_feasible()
    _, area = lower_bound(table)
    search = Search(table)
    shelves = None
    if request.lockstep > 1:
        shelves = lockstep_plan(table, search, area)
        if shelves is not None and request.lockstep == table.ranks:
            return _fallback(request, *shelves)
    chosen, layouts = search.layouts(area)
    blocks, name = search.complete(chosen, layouts[0])
    placements, makespan = finish(table, blocks)
    for layout in layouts[1:]:
        blocks, _ = search.complete(chosen, layout)
        other, ends = finish(table, blocks)
        if ends < makespan:
            placements, makespan = other, ends
    if shelves is not None and shelves[1] < makespan:
        placements, makespan, name = shelves
    return _fallback(request, placements, makespan, name)


def _fallback(request: PlanRequest, placements: list[Placement], us: int, name: str) -> Draft:
    """never_slower_than_static: the static plan where it is faster."""
    try:
        draft = static(request, None)
    except PlanError:  # the longest sample fits no static degree
        return Draft(placements=placements, algorithm=name)
    if replayed_us(request, draft.placements) < us:
        return draft
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
