"""The loader: prepared steps, agreed on by all ranks, one at a time.

Step k + 1 .. k + plan_ahead are planned and read in a background thread while step k runs. How long
the main thread had to wait for that is `step.metrics["planner_exposed_ms"]`; it is 0 in the steady
state. The position advances when a step has been finished, not when it was drawn.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megatron_dcp.dist import agree
from megatron_dcp.errors import AgreementError, ConfigError
from megatron_dcp.runtime.backend import is_deepspeed
from megatron_dcp.runtime.memory import PeakMemory
from megatron_dcp.runtime.prepare import Prepared, StepPreparer, plan_name
from megatron_dcp.runtime.recompute import check_recompute
from megatron_dcp.runtime.schedule import group_blocks
from megatron_dcp.runtime.step import Microbatch, Step
from megatron_dcp.runtime.stream import EndOfData
from megatron_dcp.runtime.watchdog import IDLE

if TYPE_CHECKING:
    from megatron_dcp.runtime.engine import Engine

log = logging.getLogger("megatron_dcp")


class StepLoader:
    """Iterate to get steps; iterate again (or resume) to go on where the last one ended.

    position: number of steps finished so far. steps: where iteration stops; None: the data's end.
    """

    def __init__(
        self,
        engine: Engine,
        preparer: StepPreparer,
        *,
        steps: int | None,
        plan_ahead: int,
        batch_dim: bool,
    ) -> None:
        self.engine, self.preparer, self.steps = engine, preparer, steps
        self.plan_ahead, self.batch_dim = plan_ahead, batch_dim
        self.position = 0
        self.dropped = self.cut = 0

    @property
    def sampler(self) -> Any:
        return self.preparer.sampler

    def __len__(self) -> int:
        if self.steps is None:
            raise ConfigError("how many steps a stream gives is known at its end; pass steps=")
        return self.steps

    def _more(self, step: int) -> bool:
        return self.steps is None or step < self.steps

    def __iter__(self) -> Iterator[Step]:
        executor = ThreadPoolExecutor(1, "mdcp-plan") if self.plan_ahead else None
        ahead: deque[Future[Prepared]] = deque()
        following = self.position
        self.preparer.settings = self.engine.settings  # the cost profile may have been replaced
        self.preparer.start(self.position)
        try:
            while self._more(self.position):
                if executor is not None:
                    while len(ahead) <= self.plan_ahead and self._more(following):
                        ahead.append(executor.submit(self.preparer.prepare, following))
                        following += 1
                begin = time.perf_counter()
                if executor is None:
                    prepared = self.preparer.prepare(self.position)
                else:
                    prepared = ahead.popleft().result()
                prepared = self._current(prepared)
                try:
                    step = self._open(prepared, (time.perf_counter() - begin) * 1e3)
                except EndOfData:
                    return
                yield step
                if not step.finished:
                    raise ConfigError(
                        f"step {step.index} was left unfinished; call step.finish() before the "
                        "next step"
                    )
        finally:
            if executor is not None:
                self._interrupt(True)
                executor.shutdown(wait=True, cancel_futures=True)
                self._interrupt(False)

    def _interrupt(self, stop: bool) -> None:
        """Nobody in the background may wait for a plan that another plane will not make."""
        if self.preparer.post is not None:
            self.preparer.post.interrupt(stop)

    def dry_run(self, loss_fn: Callable[[Microbatch], Tensor]) -> int | None:
        """Run the heaviest step that this data set can give, forward and backward, and forget it.

        A batch of the longest samples is planned and run before training, so that what would run
        out of memory hours later does so now. loss_fn(mb) returns the loss sum. Gradients are
        dropped, the optimizer and the position stay as they are. Returns the peak bytes of this
        rank above what it held before, where the device tells. Collective.
        """
        if is_deepspeed(self.engine.model):
            raise ConfigError(
                "dry_run drops gradients, which a DeepSpeed engine does not allow; start it with "
                "a small memory budget instead"
            )
        peak = PeakMemory(self.engine.world.device)
        step = self._open(self.preparer.prepare(0, self.preparer.longest()), 0.0)
        for mb in step:
            mb.backward(loss_fn(mb))
        if not self.engine.backend.closing_dummy:
            self.engine.driver.end()
        self.engine.driver.drop()
        self.engine.open_step = None
        self.engine.beat(IDLE)
        return peak.peak_bytes()

    def _current(self, prepared: Prepared) -> Prepared:
        """The step as it is, or planned again where the budget was lowered since."""
        settings = self.engine.settings
        if prepared.budget_bytes == settings.budget_bytes:
            return prepared
        self.preparer.settings = settings
        return self.preparer.prepare(prepared.step)

    def _plan_again(self, step: int, budget_bytes: int) -> Any:
        """What a Step needs to start over within a smaller budget, for this and all later steps."""
        self.engine.limit_budget(budget_bytes)
        self.preparer.settings = self.engine.settings
        prepared = self.preparer.prepare(step)
        denominator = self._agree(prepared)
        return prepared.plan, prepared.indices, prepared.work, denominator

    def _open(self, prepared: Prepared, exposed_ms: float) -> Step:
        """Agree on a step with all ranks and make its groups."""
        self.engine.forget_open_step()
        events = self.engine.log
        events.step = prepared.step
        denominator = self._agree(prepared)
        assert prepared.plan is not None
        events.add("plan", *prepared.plan_us, exposed_us=round(exposed_ms * 1e3))
        events.add("data", *prepared.data_us)
        self._count(prepared)
        step = Step(
            self.engine,
            prepared.step,
            prepared.plan,
            prepared.indices,
            prepared.work,
            denominator,
            batch_dim=self.batch_dim,
            padding=prepared.padding,
            on_finish=self._finished,
            replan=self._plan_again,
        )
        step.metrics["planner_exposed_ms"] = exposed_ms
        step.metrics["plan_us"] = prepared.plan_us[1] - prepared.plan_us[0]
        return step

    def _agree(self, prepared: Prepared) -> float:
        """The denominator of the loss, once all ranks hold the same plan and its groups exist."""
        world = self.engine.world
        self.engine.beat("agree", step=prepared.step)
        try:
            denominator = agree(
                world, prepared.plan, prepared.weight, prepared.trouble, prepared.indices
            )
        except AgreementError as error:
            if prepared.ended:
                if error.everyone:
                    raise EndOfData(str(error)) from error
                raise  # not an end: the data of other ranks goes on
            if prepared.error is not None:  # this rank's own trouble; the others name it
                raise prepared.error from error
            raise
        plan = prepared.plan
        assert plan is not None
        check_recompute(self.engine.driver.module, plan)
        world.ensure_groups(group_blocks(plan))
        if self.preparer.post is not None:
            self.preparer.post.taken(plan_name(plan.step, prepared.budget_bytes))
        return denominator

    def _finished(self, step: Step) -> None:
        self.position = step.index + 1
        self.preparer.finished(step.index)

    def _count(self, prepared: Prepared) -> None:
        self.dropped += prepared.dropped
        self.cut += prepared.cut
        if self.engine.world.rank == 0 and (prepared.dropped or prepared.cut):
            log.warning(
                "step %d: %d samples dropped and %d cut because they fit on no block (%d and %d "
                "so far)",
                prepared.step,
                prepared.dropped,
                prepared.cut,
                self.dropped,
                self.cut,
            )

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands: steps finished and the sampler that they came from."""
        return {"position": self.position, "sampler": self.preparer.sampler.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after `position` steps; refuses a state of another sampler."""
        self.preparer.sampler.check_state(state["sampler"])
        self.position = int(state["position"])
