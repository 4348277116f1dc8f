"""What a comparison of strategies drives: one trainer under one strategy, a step at a time.

Every trainer of `mdcp bench end-to-end` and `mdcp train` is a `Contender`; those that run through
an engine are an `EngineContender`. The comparison owns the order of steps, the clocks and the
tables.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from megatron_dcp.dist import DataWorld, gather_bytes
from megatron_dcp.errors import PlanError
from megatron_dcp.plan import StepPlan, dumps, loads
from megatron_dcp.planner import PlanRequest, make_plan
from megatron_dcp.runtime.engine import Engine
from megatron_dcp.runtime.step import Microbatch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRun:
    """One step that was run: its plan, global loss, this rank's events, and the planning time.

    exposed_ms: how long the step waited for plan and data; None where it was made between steps.
    """

    plan: StepPlan
    loss: float
    events: list[dict[str, Any]]
    planner_ms: float
    exposed_ms: float | None = None


class Contender(Protocol):
    """One strategy on one trainer. All ranks call the methods alike."""

    name: str

    def run_step(self) -> StepRun:
        """Draw the next global batch, plan it and train on it."""
        ...

    def close(self) -> None:
        """Give up groups and threads."""
        ...


class EngineContender:
    """A contender that runs through an engine. loss(mb): the loss sum of a microbatch."""

    def __init__(
        self,
        name: str,
        engine: Engine,
        steps: Iterator[Any],
        loss: Callable[[Microbatch], Tensor],
    ) -> None:
        self.name, self.engine, self.loss = name, engine, loss
        self._steps = steps

    def run_step(self) -> StepRun:
        step = next(self._steps)
        for mb in step:
            mb.backward(self.loss(mb))
        loss = step.finish()
        ahead = self.engine.runtime.plan_ahead > 0
        return StepRun(
            plan=step.plan,
            loss=loss,
            events=self.engine.take_events(),
            planner_ms=step.metrics["plan_us"] / 1e3,
            exposed_ms=step.metrics["planner_exposed_ms"] if ahead else None,
        )

    def close(self) -> None:
        self.engine.close()


def plan_on_rank_0(world: DataWorld, strategy: str, request: PlanRequest) -> StepPlan:
    """A plan made by rank 0 alone, the same bytes on every rank. Collective.

    For strategies with a time limit (`flexsp`), whose plans depend on the machine. Raises PlanError
    on all ranks when it cannot be made.
    """
    answer = {"plan": "", "error": ""}
    if world.rank == 0:
        try:
            answer["plan"] = dumps(make_plan(request, strategy))
        except PlanError as error:
            answer["error"] = str(error)
    told = json.loads(gather_bytes(world, json.dumps(answer).encode())[0])
    if told["error"]:
        raise PlanError(told["error"])
    return loads(told["plan"])


def timed_by_clock(strategy: str) -> bool:
    """Whether a strategy's plan depends on a time limit."""
    return strategy.partition(":")[0] == "flexsp"
