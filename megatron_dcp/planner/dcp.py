"""`dcp`, the default strategy: the C++ planner (its readable twin is `planner.oracle`).

Post-condition `never_slower_than_static`: the planner keeps the best static plan where nothing
else is faster, so that no `dcp` plan is slower than `static` under the model.
"""

from __future__ import annotations

from megatron_dcp.planner.registry import Draft, PlanRequest, register


@register("dcp")
def dcp(request: PlanRequest, parameter: str | None) -> Draft:
    """Wide first on nested blocks, local search, packs with recompute; see docs/planner.md."""
    from megatron_dcp.planner.core import plan

    return plan(request)
