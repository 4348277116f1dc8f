"""The call into the C++ planner; its failures become PlanError.

Nothing is decided here: the request goes down, placements come back. `planner_us` is the time of
that one call (reading the lengths, the whole search, prices and replay), without the making of
Python's Placement objects.
"""

from __future__ import annotations

import time

from megatron_dcp import _planner
from megatron_dcp.cost.model import layers_per_stage
from megatron_dcp.errors import ConfigError, PlanError
from megatron_dcp.plan import Placement
from megatron_dcp.planner.registry import Draft, PlanRequest

_MAX_BUDGET = 2**62


def check_request(request: PlanRequest) -> None:
    """What the planner refuses before it starts; raises ConfigError."""
    layers_per_stage(request.profile, request.topology)
    if request.profile.pairs == "grid" and request.workload.shapes is None:
        raise ConfigError(
            f"cost profile {request.profile.name!r} counts pairs on a grid, the workload has no "
            "shapes; pass shapes [[frames, height, width], ...] or a profile with pairs causal or "
            "full"
        )
    if request.budget_bytes > _MAX_BUDGET:
        raise ConfigError(
            f"memory budget of {request.budget_bytes} bytes is above {_MAX_BUDGET}; "
            "give the budget of one rank in bytes"
        )
    n = request.topology.data_ranks
    if request.lockstep < 1 or n % request.lockstep:
        raise ConfigError(
            f"lockstep domains of {request.lockstep} ranks do not tile {n} data ranks; "
            "use a divisor"
        )


def plan(request: PlanRequest) -> Draft:
    """The `dcp` plan. Raises PlanError when a sample fits nowhere, ConfigError for bad requests."""
    check_request(request)
    begin = time.perf_counter_ns()
    try:
        result = _planner.plan(request)
    except _planner.PlanFailure as error:
        raise PlanError(str(error), invariant="fits_memory") from None
    planner_us = (time.perf_counter_ns() - begin) // 1000
    placements = [
        Placement(
            slot=slot,
            first_rank=first,
            degree=degree,
            samples=tuple(samples),
            scheme=scheme,
            inner_degree=inner,
            recompute=recompute,
            time_us=time_us,
            bytes=size,
        )
        for slot, first, degree, samples, scheme, inner, recompute, time_us, size in (
            result.placements
        )
    ]
    return Draft(placements=placements, algorithm=result.algorithm, info={"planner_us": planner_us})


def lower_bound_us(request: PlanRequest) -> int:
    """No plan of the cost model has a smaller makespan. Raises as `plan` does."""
    check_request(request)
    try:
        return _planner.lower_bound_us(request)
    except _planner.PlanFailure as error:
        raise PlanError(str(error), invariant="fits_memory") from None
