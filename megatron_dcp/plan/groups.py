"""Process groups that a plan needs."""

from __future__ import annotations

from megatron_dcp.plan.types import StepPlan


def communicators(plan: StepPlan) -> set[tuple[int, ...]]:
    """Process groups that a plan needs besides the world: (first, size) of each shared block, and
    (first, size, stride) of the inner and outer groups of hybrid blocks. Size 1 needs none."""
    out: set[tuple[int, ...]] = set()
    for p in plan.placements:
        if p.degree == 1:
            continue
        u = p.inner_degree
        if p.scheme != "hybrid":
            out.add((p.first_rank, p.degree))
            continue
        out.update((p.first_rank + k, u) for k in range(0, p.degree, u))
        out.update((p.first_rank + k, p.degree // u, u) for k in range(u))
    return out
