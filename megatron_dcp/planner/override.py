"""Another scheme than the cost model chose: for measurements, or where a profile misjudges a link.

    plan_fn = lambda request: with_scheme(make_plan(request, "dcp"), request, "ring")

What each placement holds, its block and its recomputation stay; only the scheme, its time and its
bytes change, so the choice stands in the plan like any other.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_dcp.cost import pack_of
from megatron_dcp.errors import PlanError
from megatron_dcp.plan import Placement, StepPlan, check_plan, makespan_us
from megatron_dcp.plan.replay import idle_share
from megatron_dcp.plan.types import SCHEMES
from megatron_dcp.planner.registry import PlanRequest


def with_scheme(plan: StepPlan, request: PlanRequest, scheme: str) -> StepPlan:
    """The plan with every placement of several ranks on `scheme`, priced anew.

    Of several inner degrees the fastest is taken. PlanError where heads, nodes or memory of a
    placement do not allow the scheme, naming the placement.
    """
    if scheme not in SCHEMES or scheme == "local":
        known = ", ".join(s for s in SCHEMES if s != "local")
        raise PlanError(f"scheme {scheme!r} asked for shared placements; known are {known}")
    placements = tuple(p if p.degree == 1 else _on(p, request, scheme) for p in plan.placements)
    plan = replace(plan, placements=placements, algorithm=f"{plan.algorithm}+{scheme}")
    plan = replace(plan, makespan_us=makespan_us(plan))
    plan = replace(plan, info={**plan.info, "idle": idle_share(plan), "gap": plan.gap})
    return check_plan(plan, request.profile.head_limits)


def _on(p: Placement, request: PlanRequest, scheme: str) -> Placement:
    cost = request.cost
    pack = pack_of(request.profile, request.workload, p.samples)
    speed = request.topology.block_speed(p.first_rank, p.degree)
    priced = [
        replace(
            p,
            scheme=scheme,
            inner_degree=mode.inner_degree,
            time_us=cost.time_us(pack, p.degree, mode, p.recompute, speed),
            bytes=cost.bytes(pack, p.degree, mode, p.recompute),
        )
        for mode in cost.modes(p.degree)
        if mode.scheme == scheme
    ]
    if not priced:
        limits = request.profile.head_limits
        raise PlanError(
            f"scheme {scheme} asked, the placement (slot {p.slot}, ranks {p.first_rank}.."
            f"{p.first_rank + p.degree - 1}) of degree {p.degree} cannot run it with "
            f"{limits.heads} heads, {limits.kv_heads} KV heads and nodes of "
            f"{request.topology.ranks_per_node} ranks; use ring or allgather"
        )
    return min(priced, key=lambda x: (x.time_us, x.inner_degree))
