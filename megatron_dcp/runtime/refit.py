"""Watching the cost profile while training: measured microbatches feed an online refit.

    watch = RefitWatch(engine)               # nothing happens unless you make one
    while loader.position < len(loader):
        for step in loader:
            ...
            step.finish()
            metrics |= watch.after_step(step)            # before engine.take_events()
            if time_for_a_checkpoint and watch.at_checkpoint(folder):
                break                                    # go on with the new profile
        save_checkpoint(engine, loader, folder)

Plans are a function of the profile, and steps are planned ahead, so a profile is replaced at a
checkpoint and nowhere else. A proposal is logged when it is first made; at the checkpoint it is
written as `cost-<digest>.json`, a new profile version, and the engine goes on with it: the
checkpoint names its digest, and a run that resumes loads that file. All ranks feed the same numbers
(the slowest rank of each placement) and take the profile of rank 0.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_dcp.cost import CostModel, dumps, from_object
from megatron_dcp.cost.online import OnlineRefit, Proposal
from megatron_dcp.dist import gather_bytes
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
        """Adopt the present proposal: write it as `folder/cost-<digest>.json` and use it.

        Returns the file's path, or None where there is no proposal. Call it before the checkpoint
        is written, and iterate the loader anew where it returned a path. Collective.
        """
        world, found = self.engine.world, self.proposal
        mine = dumps(found.profile) if found is not None else ""
        text = gather_bytes(world, mine.encode())[0].decode()
        if not text:
            return None
        profile = from_object(json.loads(text))
        path = Path(folder) / f"cost-{profile.ref.digest}.json"
        if world.rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            log.info("cost refit adopted: %s, %s", profile.name, path)
        gather_bytes(world, b"")  # nobody reads the file before it is there
        self.engine.use_cost(profile)
        self.refit, self.proposal = self.refit.adopt(profile), None
        return path
