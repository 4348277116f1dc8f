"""`step.run(loss_fn)`: a step that survives running out of memory where that can be survived.

A rank may give up a step as long as no other rank waits for it inside a collective. So ranks meet
at gates (see `gates`): the ranks of a block before the first message of its microbatch, and all
ranks before gradients are reduced. In lockstep over all ranks, where a wrapper communicates from
the first layer on, they meet before every forward. When a rank runs out of memory before it went
through such a gate, all ranks leave the step at their next one, agree on a smaller budget, plan the
same samples again and start the step over; parameters, optimizer and scheduler are untouched.

Anywhere else the rank ends with the numbers (`OutOfMemoryError`), and so do the others by the
watchdog; a launcher that restarts the job hands it the smaller budget (see `oom`).

Not survived: DeepSpeed engines and FSDP2 that keeps its parameters (gradients of a broken step
cannot be dropped there), lockstep domains between one rank and all, several planes (TP, PP), and
steps that start with gradients already there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megatron_dcp.dist import gather_bytes
from megatron_dcp.errors import OutOfMemoryError
from megatron_dcp.planner.oversize import most_bytes_needed
from megatron_dcp.runtime import oom
from megatron_dcp.runtime.backend import trainable
from megatron_dcp.runtime.gates import Gates
from megatron_dcp.runtime.memory import give_back

if TYPE_CHECKING:
    from megatron_dcp.runtime.engine import Engine
    from megatron_dcp.runtime.step import Microbatch, Step

log = logging.getLogger("megatron_dcp")

LossFn = Callable[["Microbatch"], Tensor]
MOST_ATTEMPTS = 8  # each takes a tenth off the budget
_DROPPABLE = ("bare", "ddp", "fsdp2")  # backends whose gradients of a broken step can be dropped


class StepAborted(Exception):
    """Another rank gave up this step; raised at a gate, never seen outside of `run_step`."""


def run_step(step: Step, loss_fn: LossFn) -> float:
    """Run all microbatches and finish; the loss of the global batch. Collective."""
    gates = step.engine.gates
    for number in range(MOST_ATTEMPTS):
        attempt = Attempt(step, gates, number)
        report: oom.OomReport | None = None
        step.attempt = attempt
        try:
            return _once(step, loss_fn)
        except StepAborted:
            pass
        except (MemoryError, RuntimeError) as error:
            if not oom.is_out_of_memory(error):
                raise
            report = attempt.report(error)
            if not attempt.may_leave:
                end_out_of_memory(step, report, error)
        finally:
            step.attempt = None
            attempt.close()
        _plan_again(step, attempt, report)
    raise OutOfMemoryError(
        f"step {step.index} ran out of memory {MOST_ATTEMPTS} times, with ever smaller budgets; "
        "the memory model is far off: measure one with `mdcp profile`"
    )


def _once(step: Step, loss_fn: LossFn) -> float:
    microbatches: Any = iter(step)
    with closing(microbatches):
        for mb in microbatches:
            mb.backward(loss_fn(mb))
    return step.finish()


def _plan_again(step: Step, attempt: Attempt, report: oom.OomReport | None) -> None:
    """All ranks come here; leaves the step ready to be run with a smaller budget."""
    engine = step.engine
    attempt.leave()
    engine.driver.drop()
    engine.open_step = None
    step.forget()
    give_back(engine.world.device)
    found = [oom.load_report(b) for b in gather_bytes(engine.world, oom.dump_report(report))]
    reports = [r for r in found if r is not None]
    budget = _next_budget(step, reports)
    text = "; ".join(r.text() for r in reports)
    if budget is None:
        raise OutOfMemoryError(
            f"{text}. No smaller budget can hold the longest sample of the step: use more ranks, "
            "shard the model's state, or cut samples with max_length"
        )
    if engine.world.rank == 0:
        log.warning("%s. The step is planned again with a budget of %d bytes", text, budget)
    step.again(budget)


def _next_budget(step: Step, reports: list[oom.OomReport]) -> int | None:
    engine = step.engine
    leanest = most_bytes_needed(
        engine.cost_model, max(step.plan.lengths), recompute=engine.planner.recompute == "auto"
    )
    return oom.smaller_budget(reports, step.plan.budget_bytes, engine.profile.static_bytes, leanest)


def end_out_of_memory(step: Step, report: oom.OomReport, error: BaseException) -> None:
    """End this rank with the numbers; the others' watchdogs end them. Never returns."""
    engine, budget = step.engine, _next_budget(step, [report])
    if budget is None:
        text = f"{report.text()}. No smaller budget can hold the longest sample of the step"
        if engine.watchdog is not None:
            engine.watchdog.end_others(text)
        raise OutOfMemoryError(text) from error
    text = (
        f"{report.text()}. Other ranks may already wait for it in this step, so it cannot be "
        f"planned again: start from the last checkpoint with memory={budget / 1e9:.6g} (GB per "
        "rank); `python -m megatron_dcp.cli.elastic` does that by itself"
    )
    oom.write_budget(budget, text)
    if engine.watchdog is not None:
        engine.watchdog.end_others(text, budget_bytes=budget)
    raise OutOfMemoryError(text) from error


class Attempt:
    """One try at a step: which gates this rank still has before it, and whether it may leave."""

    def __init__(self, step: Step, gates: Gates, number: int) -> None:
        engine = step.engine
        self.step, self.gates = step, gates
        self._engine = engine
        self._prefix = f"{step.index}.{number}."
        self._together = engine.lockstep == engine.world.size > 1
        self._possible = _possible(engine)
        self._left = self._gates()
        self._committed = False  # whether others may wait for this rank inside a collective
        self._mb: Microbatch | None = None
        self._hook = None
        engine.driver.reduce_at_end = True
        if self._together:
            self._hook = engine.model.register_forward_pre_hook(
                lambda *_: self._before_forward(), prepend=True
            )

    def _gates(self) -> dict[str, int]:
        """Name and number of ranks of each gate of this rank, in order; the last is for all."""
        size = self._engine.world.size
        found: dict[str, int] = {}
        for i, mb in enumerate(self.step.microbatches):
            members = size if self._together else mb.placement.degree
            if members > 1:
                name = self._gate_of(mb, i)
                if self._measured(mb):
                    found[f"{name}.begin"] = members
                found[name] = members
        found[self._end] = size
        return found

    def _gate_of(self, mb: Microbatch, index: int | None = None) -> str:
        """Lockstep: the number of the microbatch, equal on all ranks; else its slot and block."""
        if self._together:
            number = self.step.microbatches.index(mb) if index is None else index
            return f"{self._prefix}m{number}"
        return f"{self._prefix}s{mb.placement.slot}.{mb.placement.first_rank}"

    @property
    def _end(self) -> str:
        return f"{self._prefix}end"

    @property
    def may_leave(self) -> bool:
        """Whether this rank can give up the step without leaving others waiting for it."""
        return self._possible and not self._committed

    def report(self, error: BaseException) -> oom.OomReport:
        placement = None if self._mb is None else self._mb.placement
        engine, step = self._engine, self.step
        return oom.make_report(engine.world, step.plan, placement, step.indices, error)

    def enter(self, mb: Microbatch) -> None:
        """A microbatch begins. Where its ranks are measured, they meet at a gate first."""
        self._mb = mb
        if self._measured(mb):
            self._pass(f"{self._gate_of(mb)}.begin")
        self._committed = False

    def arm(self) -> None:
        """The forward begins. The first message, if any, is preceded by the gate of its block."""
        if not self._together:
            self._engine.world.wire.before_next = self._before_message

    def _measured(self, mb: Microbatch) -> bool:
        return self._engine.log.measure and mb.placement.degree > 1 and not self._together

    def _before_message(self) -> None:
        mb = self._mb
        if mb is not None and mb.placement.degree > 1:
            self._pass(self._gate_of(mb))

    def _before_forward(self) -> None:
        """Once per microbatch, at the first forward of the wrapped model."""
        if self._mb is not None and not self._committed:
            self._pass(self._gate_of(self._mb))

    def forward_done(self, mb: Microbatch) -> None:
        """A microbatch goes into backward. Its gate opens for the others, were it not needed here.

        A rank whose shard neither sees nor is seen by another's sends nothing.
        """
        if not self._committed and mb is self._mb and (name := self._gate_of(mb)) in self._left:
            self.gates.arrive(name, self._left.pop(name), goes_on=True)

    def before_reduction(self) -> None:
        """All ranks meet before gradients are reduced."""
        self._mb = None
        self._pass(self._end)
        self.gates.forget(but=self._end)

    def _pass(self, name: str) -> None:
        """After it this rank is committed: others may wait for it inside a collective."""
        self.gates.arrive(name, self._left.pop(name), goes_on=True)
        if not self.gates.wait(name):
            raise StepAborted
        self._committed = True

    def leave(self) -> None:
        """Give up the step at all gates that are left; returns when all ranks have."""
        for name, size in self._left.items():
            self.gates.arrive(name, size, goes_on=False)
        self._left = {}
        self.gates.wait(self._end)
        self.gates.forget(but=self._end)

    def close(self) -> None:
        self._engine.world.wire.before_next = None
        self._engine.driver.reduce_at_end = False
        if self._hook is not None:
            self._hook.remove()


def _possible(engine: Engine) -> bool:
    fresh = all(p.grad is None for p in trainable(engine.driver.module))
    domain = engine.lockstep in (1, engine.world.size)
    return engine.backend.name in _DROPPABLE and domain and fresh and len(engine.world.planes) == 1
