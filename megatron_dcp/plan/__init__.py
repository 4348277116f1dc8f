"""StepPlan and what belongs to it: types, canonical JSON, invariants, replay, diff. No torch."""

from megatron_dcp.plan.canonical import (
    SCHEMA,
    canonical_bytes,
    digest,
    dumps,
    from_object,
    load,
    loads,
    to_object,
)
from megatron_dcp.plan.check import HeadLimits, check_plan
from megatron_dcp.plan.diff import diff, first_difference
from megatron_dcp.plan.replay import idle_share, makespan_us, timeline
from megatron_dcp.plan.types import (
    CostRef,
    Placement,
    StepPlan,
    Topology,
    Workload,
    lockstep_ranks,
)

__all__ = [
    "SCHEMA",
    "CostRef",
    "HeadLimits",
    "Placement",
    "StepPlan",
    "Topology",
    "Workload",
    "canonical_bytes",
    "check_plan",
    "diff",
    "digest",
    "dumps",
    "first_difference",
    "from_object",
    "idle_share",
    "load",
    "loads",
    "lockstep_ranks",
    "makespan_us",
    "timeline",
    "to_object",
]
