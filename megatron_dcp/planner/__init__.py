"""Planning: strategies in one registry, the C++ core, its Python oracle, the lower bound."""

from __future__ import annotations

from dataclasses import replace

from megatron_dcp.cost import resolve
from megatron_dcp.plan import StepPlan, Topology, Workload
from megatron_dcp.planner import baselines as _baselines  # noqa: F401  (registers them)
from megatron_dcp.planner import dcp as _dcp  # noqa: F401
from megatron_dcp.planner.override import with_scheme
from megatron_dcp.planner.registry import (
    Draft,
    PlanRequest,
    build_plan,
    find_strategy,
    register,
    strategy_names,
)

__all__ = [
    "Draft",
    "PlanRequest",
    "StepPlan",
    "check_strategy",
    "make_plan",
    "register",
    "strategy_names",
    "with_scheme",
]


def check_strategy(strategy: str, topology: Topology) -> None:
    """Raises ConfigError unless the strategy and its parameter can be used on these ranks."""
    one = Workload(lengths=(1,))
    # Layers of the profile here need not divide over the stages of the run.
    topology = replace(topology, pipeline_stages=1, virtual_stages=1)
    make_plan(PlanRequest(workload=one, topology=topology, profile=resolve("a100-gpt7b")), strategy)


def make_plan(request: PlanRequest, strategy: str = "dcp") -> StepPlan:
    """Plan one step with a registered strategy; the result has passed every invariant.

    Raises ConfigError for an unknown strategy or parameter, PlanError when a sample cannot fit.
    """
    from megatron_dcp.planner.core import lower_bound_us

    function, parameter = find_strategy(strategy)
    return build_plan(request, strategy, function, lower_bound_us, parameter)
