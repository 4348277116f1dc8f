"""One registry of strategies: every one turns a PlanRequest into the same StepPlan.

A strategy is a function `(request, parameter) -> Draft` registered under a name; `packed:2` calls
`packed` with parameter "2". It only chooses placements and prices them; `make_plan` adds what all
plans carry (makespan by replay, lower bound, idle share, planner time) and checks every invariant,
so no strategy can hand out a plan that breaks one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_dcp.cost import CostModel, CostProfile
from megatron_dcp.errors import ConfigError
from megatron_dcp.plan import Placement, StepPlan, Topology, Workload, check_plan
from megatron_dcp.plan.replay import idle_share, makespan_us


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """Everything a plan is a function of.

    lockstep: ranks per lockstep domain (1 = async). budget_bytes: per rank; 0 takes the profile's.
    recompute: False forbids activation recomputation.
    """

    workload: Workload
    topology: Topology
    profile: CostProfile
    lockstep: int = 1
    budget_bytes: int = 0
    recompute: bool = True
    step: int = 0

    def __post_init__(self) -> None:
        if not self.budget_bytes:
            object.__setattr__(self, "budget_bytes", self.profile.budget_bytes)
        if not isinstance(self.budget_bytes, int):
            raise ConfigError(
                f"memory budget is {self.budget_bytes!r}; give the bytes of one rank as an integer"
            )
        if self.budget_bytes < 1:
            raise ConfigError(
                f"memory budget is {self.budget_bytes} bytes and profile {self.profile.name!r} "
                "brings none; pass --memory-gb"
            )

    @property
    def cost(self) -> CostModel:
        return CostModel(self.profile, self.topology, self.lockstep)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What a strategy returns: priced placements and the name of the algorithm that won."""

    placements: Sequence[Placement]
    algorithm: str
    info: Mapping[str, Any] = field(default_factory=dict)


Strategy = Callable[[PlanRequest, str | None], Draft]
LowerBound = Callable[[PlanRequest], int]

_STRATEGIES: dict[str, tuple[Strategy, str | None]] = {}


def register(name: str, *, parameter: str | None = None) -> Callable[[Strategy], Strategy]:
    """Register a strategy; `parameter` describes what may follow the colon (None: nothing)."""

    def add(strategy: Strategy) -> Strategy:
        if name in _STRATEGIES:
            raise ValueError(f"strategy {name!r} registered twice")
        _STRATEGIES[name] = (strategy, parameter)
        return strategy

    return add


def strategy_names() -> list[str]:
    """Registered names, in the order of registration."""
    return list(_STRATEGIES)


def find_strategy(spec: str) -> tuple[Strategy, str | None]:
    """The strategy and parameter of `name` or `name:parameter`."""
    name, colon, parameter = spec.partition(":")
    if name not in _STRATEGIES:
        raise ConfigError(f"unknown strategy {name!r}; known are {', '.join(_STRATEGIES)}")
    strategy, takes = _STRATEGIES[name]
    if colon and takes is None:
        raise ConfigError(f"strategy {name!r} takes no parameter, found {spec!r}")
    if colon and not parameter:
        raise ConfigError(f"strategy {spec!r}: nothing after the colon; {name} takes {takes}")
    return strategy, parameter or None


def build_plan(
    request: PlanRequest, spec: str, strategy: Strategy, bound: LowerBound, parameter: str | None
) -> StepPlan:
    """Run one strategy and complete, check and time its plan."""
    if not request.workload.lengths:
        raise ConfigError("the global batch is empty: a plan needs at least one sample")
    begin = time.perf_counter_ns()
    draft = strategy(request, parameter)
    planner_us = (time.perf_counter_ns() - begin) // 1000
    plan = StepPlan(
        strategy=spec,
        algorithm=draft.algorithm,
        topology=request.topology,
        lockstep=request.lockstep,
        cost=request.profile.ref,
        budget_bytes=request.budget_bytes,
        layers=request.cost.layers,
        workload=request.workload,
        placements=tuple(draft.placements),
        makespan_us=0,
        lower_bound_us=bound(request),
        step=request.step,
    )
    plan = replace(plan, makespan_us=makespan_us(plan))
    info = {"planner_us": planner_us, "idle": idle_share(plan), "gap": plan.gap, **draft.info}
    return check_plan(replace(plan, info=info), request.profile.head_limits)
