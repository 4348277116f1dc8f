"""A `transformers.Trainer` that trains one optimizer step at a time, when it is told to.

`trainer.train()` runs in a thread of its own and stops at the start of every step, so that several
trainers of one process can take turns (`mdcp bench end-to-end`). Only one of the threads runs at
any time: the current placement belongs to the process.
"""

from __future__ import annotations

import queue
import tempfile
import threading
from collections.abc import Callable
from typing import Any

from transformers import Trainer, TrainerCallback

from megatron_dcp.adapters.hf.trainer import MdcpTrainerMixin
from megatron_dcp.dist import LinkPacer
from megatron_dcp.runtime.contender import StepRun


class SteppedTrainer(MdcpTrainerMixin, Trainer):  # type: ignore[misc]
    """bytes_per_s: pace of what a rank sends, None: as it is."""

    def __init__(self, *args: Any, bytes_per_s: float | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._bytes_per_s = bytes_per_s
        self._before_step: Callable[[], None] = lambda: None

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._before_step()
        return super().training_step(*args, **kwargs)

    def _mdcp_start(self, model: Any) -> None:
        super()._mdcp_start(model)
        if self._bytes_per_s is not None:
            self.mdcp_engine.world.wire.pacer = LinkPacer(self._bytes_per_s)


class _Stopped(Exception):
    """Ends the thread between two steps."""


class TrainerTurns(TrainerCallback):  # type: ignore[misc]
    """A contender: `run_step` lets the trainer do one optimizer step and returns what it was.

    folder: the trainer's output folder, removed by `close`.
    """

    def __init__(
        self, name: str, trainer: SteppedTrainer, folder: tempfile.TemporaryDirectory[str]
    ) -> None:
        self.name, self.trainer, self._folder = name, trainer, folder
        self._go: queue.Queue[bool] = queue.Queue()
        self._done: queue.Queue[StepRun | BaseException] = queue.Queue()
        self._thread = threading.Thread(target=self._train, name=f"train {name}", daemon=True)
        trainer._before_step = self._wait
        trainer.add_callback(self)

    def run_step(self) -> StepRun:
        if not self._thread.is_alive():
            self._thread.start()
        self._go.put(True)
        told = self._done.get()
        if isinstance(told, BaseException):
            raise told
        return told

    def close(self) -> None:
        if self._thread.is_alive():
            self._go.put(False)
            self._thread.join(timeout=60)
        if self.trainer.mdcp_engine is not None:
            self.trainer.mdcp_engine.close()
        self._folder.cleanup()

    def _train(self) -> None:
        try:
            self.trainer.train()
        except _Stopped:
            return
        except BaseException as error:
            self._done.put(error)

    def _wait(self) -> None:
        """In the trainer's thread, before a step."""
        if not self._go.get():
            raise _Stopped

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After the optimizer: the step ends here, not where its gradients were ready."""
        engine, step = self.trainer.mdcp_engine, self.trainer._mdcp_last
        begin = max(e["end_us"] for e in engine.events)
        end = engine.log.clock()
        engine.log.add("optimizer", begin, end)
        events = engine.take_events()
        for event in events:
            if event["kind"] == "step":
                event["end_us"] = end
        run = StepRun(
            plan=step.plan,
            loss=float(step.loss),
            events=events,
            planner_ms=step.metrics["plan_us"] / 1e3,
        )
        self._done.put(run)
