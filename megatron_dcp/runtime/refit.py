"""Watching the cost profile while training: measured microbatches feed an online refit.

    watch = RefitWatch(engine)               # nothing happens unless you make one
    for step in loader:
        ...
        step.finish()
        metrics |= watch.after_step(step)    # before engine.take_events()
    ...
    watch.at_checkpoint(folder)              # writes the proposal, if there is one

The engine goes on with its profile: plans are a function of it, and steps are planned ahead. A
proposal is logged when it is first made and written at a checkpoint as `cost-<digest>.json`, a new
profile version; a run that starts or resumes with that file uses it. All ranks feed the same
numbers (the slowest rank of each placement), so all hold the same proposal.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_dcp.cost import CostModel, dumps
from megatron_dcp.cost.online import OnlineRefit, Proposal
from megatron_dcp.errors import ConfigError

if TYPE_CHECKING:
    from megatron_dcp.runtime.engine import Engine
    from megatron_dcp.runtime.step import Step

log = logging.getLogger("megatron_dcp")


class RefitWatch:
    """Feeds an `OnlineRefit` from an engine that measures. refit: the state, for inspection."""

    def __init__(self, engine: Engine, *, forgetting: float = 0.995) -> None:
        if not engine.log.measure:
            raise ConfigError(
                "RefitWatch needs measured times: call mdcp.initialize(..., measure=True)"
            )
        self.engine = engine
        cost = CostModel(engine.profile, engine.topology, engine.lockstep)
        self.refit = OnlineRefit(cost=cost, forgetting=forgetting)
        self.proposal: Proposal | None = None

    def after_step(self, step: Step) -> dict[str, float]:
        """Learn from a finished step; returns metrics (mean relative errors). Collective."""
        if not step.finished:
            raise ConfigError(f"step {step.index}: call after_step after step.finish()")
        self.refit.observe_plan(step.plan, self._measured(step))
        found = self.refit.propose()
        if found is not None and self.proposal is None and self.engine.world.rank == 0:
            log.info("%s", found.log_line())
        self.proposal = found
        return self.refit.metrics

    def _measured(self, step: Step) -> dict[int, float]:
        """us of each placement, by index into the plan: the slowest of its ranks."""
        index = {(p.slot, p.first_rank): i for i, p in enumerate(step.plan.placements)}
        world = self.engine.world
        times = torch.zeros(len(index), dtype=torch.float64, device=world.device)
        for e in self.engine.events:
            if e["kind"] == "placement" and e["step"] == step.index and e["tokens"] > 0:
                i = index[e["slot"], e["first_rank"]]
                times[i] = max(float(times[i]), e["end_us"] - e["start_us"])
        if world.size > 1:
            dist.all_reduce(times, dist.ReduceOp.MAX, group=world.group)
        return {i: t for i, t in enumerate(times.tolist()) if t > 0}

    def at_checkpoint(self, folder: str | Path) -> Path | None:
        """Write the present proposal beside a checkpoint (rank 0); its path, or None."""
        if self.proposal is None:
            return None
        profile = self.proposal.profile
        path = Path(folder) / f"cost-{profile.ref.digest}.json"
        if self.engine.world.rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(dumps(profile))
            log.info("cost refit written to %s; start or resume with cost=%r to use it",
                     path, str(path))  # fmt: skip
        return path
