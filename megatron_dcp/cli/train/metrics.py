"""What a long run measures while it trains: events, plans and summary for `mdcp report`, sinks.

On only with `--metrics` or `--refit`: measuring waits for a block before each of its placements, so
that waiting and communication can be told apart.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatron_dcp.cli.train.options import TrainOptions
from megatron_dcp.dist import gather_bytes
from megatron_dcp.observe.events import EventWriter
from megatron_dcp.observe.run_dir import clear_run, write_plan
from megatron_dcp.observe.shares import step_shares
from megatron_dcp.observe.sinks import Sink, open_sinks, step_metrics
from megatron_dcp.observe.summary import RunSummary, StepRecord
from megatron_dcp.runtime.refit import RefitWatch

_PLANS = 16  # how many of the last steps' plans stay on disk


class RunMetrics:
    """Every rank makes one and calls it alike. refit: the watch, or None."""

    def __init__(self, options: TrainOptions, engine: Any) -> None:
        self.out, self.engine = options.out, engine
        self.refit = RefitWatch(engine) if options.refit else None
        self._events = EventWriter(options.out, engine.world.rank)
        config = {k: v if isinstance(v, int | float | str | None) else str(v)
                  for k, v in asdict(options).items()}  # fmt: skip
        config["ranks"] = engine.world.size
        self._summary = RunSummary(what=f"{engine.world.size} ranks", config=config)
        self._sinks: list[Sink] = []
        if engine.world.rank == 0:
            clear_run(options.out, ranks=engine.world.size)
            self._sinks = open_sinks(
                options.metric_sinks, options.out, config, every=options.metrics_every
            )

    def after_step(self, step: Any) -> None:
        """Write a finished step. Collective."""
        learnt = self.refit.after_step(step) if self.refit is not None else {}
        engine = self.engine
        events = engine.take_events()
        self._events.write(events, strategy=step.plan.strategy)
        parts = gather_bytes(engine.world, json.dumps(events).encode())
        if engine.world.rank != 0:
            return
        shares = step_shares(e for part in parts for e in json.loads(part))[step.index]
        record = replace(
            StepRecord.of(step.plan, shares, loss=step.loss),
            planner_ms=step.metrics["plan_us"] / 1e3,
            exposed_ms=step.metrics["planner_exposed_ms"],
        )
        self._summary.add(step.plan.strategy, record)
        write_plan(self.out, step.plan, keep=_PLANS)
        exposed = {"plan/exposed_ms": step.metrics["planner_exposed_ms"]}
        metrics = step_metrics(step.plan, shares, loss=step.loss) | exposed | learnt
        for sink in self._sinks:
            sink.write(step.index, metrics)

    def at_checkpoint(self) -> Path | None:
        """Write the summary so far; adopt a refit: the new profile's file, or None. Collective."""
        if self._summary.records:
            self._summary.write(self.out)
        return self.refit.at_checkpoint(self.out) if self.refit is not None else None

    def close(self) -> None:
        self._events.close()
        for sink in self._sinks:
            sink.close()
