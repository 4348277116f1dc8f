"""A Trainer callback that leaves a run directory for `mdcp report`.

    trainer = PlannedTrainer(..., mdcp={"measure": True}, callbacks=[MdcpCallback("runs/sft")])

Every rank appends its events to `events-rank<R>.jsonl`; rank 0 keeps the plans of the last steps
and, when training ends, writes `summary.json` from the measured shares of those steps.
"""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from megatron_dcp.dist import gather_bytes
from megatron_dcp.errors import ConfigError
from megatron_dcp.observe.events import EventWriter
from megatron_dcp.observe.run_dir import write_plan
from megatron_dcp.observe.shares import step_shares
from megatron_dcp.observe.summary import RunSummary, StepRecord


class MdcpCallback(TrainerCallback):  # type: ignore[misc]  # transformers ships no types for it
    """run: directory to write. keep: how many of the last steps have plans and enter the summary.

    The mixin sets `trainer`.
    """

    def __init__(self, run: str | Path, *, keep: int = 16) -> None:
        if keep < 1:
            raise ConfigError(f"keep={keep}: the summary needs at least one step")
        self.run, self.keep = Path(run), keep
        self.trainer: Any = None
        self._writer: EventWriter | None = None
        self._kept: deque[tuple[Any, list[dict[str, Any]]]] = deque(maxlen=keep)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.trainer is None or not self.trainer.mdcp_options.measure:
            raise ConfigError(
                "MdcpCallback needs a trainer with MdcpTrainerMixin and mdcp={'measure': True}: "
                "without measuring there are no events to write"
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        engine, step = self.trainer.mdcp_engine, self.trainer._mdcp_last
        if self._writer is None:
            self._writer = EventWriter(self.run, engine.world.rank)
        events = engine.take_events()
        strategy = engine.planner.strategy
        self._writer.write(events, strategy=strategy)
        self._kept.append((step, events))
        if engine.world.rank == 0:
            write_plan(self.run, step.plan, keep=self.keep)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Gather the kept steps' events and write the summary. Collective."""
        if not self._kept:
            return
        engine = self.trainer.mdcp_engine
        mine = [e for _, events in self._kept for e in events]
        parts = gather_bytes(engine.world, json.dumps(mine).encode())
        if engine.world.rank:
            return
        shares = step_shares(e for part in parts for e in json.loads(part))
        summary = RunSummary(
            what="transformers.Trainer",
            config={"ranks": engine.world.size, "global_batch": self.trainer.mdcp_batch},
        )
        for step, _ in self._kept:
            measured = shares.get(step.index)
            if measured is not None:
                record = StepRecord.of(step.plan, measured, loss=step.loss)
                summary.add(engine.planner.strategy, record)
        if summary.records:
            summary.write(self.run)
