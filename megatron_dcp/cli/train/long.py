"""`mdcp train --train-steps N`: one strategy, checkpoints, exact resume, preemption.

Writes OUT/steps.jsonl, one line per finished step (step, plan digest, loss, tokens, planner time
that was exposed), OUT/cost.json and OUT/checkpoints. A resumed run plans with the profile of the
run that it continues, so that digests and losses go on exactly.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import megatron_dcp as mdcp
from megatron_dcp.cli.train.model import Gpt, loss_sum
from megatron_dcp.cli.train.options import TrainOptions
from megatron_dcp.cost import CostProfile, dumps, load
from megatron_dcp.data.stdlib import TextCorpus
from megatron_dcp.dist import DataWorld, gather_bytes
from megatron_dcp.plan import digest
from megatron_dcp.runtime.checkpoint import load_checkpoint, save_checkpoint, whole_checkpoints
from megatron_dcp.runtime.preempt import STOP_STATUS


def train_long(
    options: TrainOptions,
    *,
    corpus: TextCorpus,
    model: Gpt,
    fitted: Callable[[], CostProfile],
    say: Any,
) -> int:
    """Train, checkpointing; returns 0, or STOP_STATUS when a signal ended the run early."""
    assert options.train_steps is not None
    checkpoints = options.out / "checkpoints"
    profile = _profile(options, checkpoints, fitted)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.train_steps)
    engine = mdcp.initialize(
        model, optimizer, cost=profile, strategy=options.strategy_names[-1], scheduler=scheduler,
        ranks_per_node=options.ranks_per_node, max_grad_norm=1.0, watchdog_s=options.watchdog_s,
        watchdog_dir=str(options.out),
    )  # fmt: skip
    engine.wrap_layers(model.layers)
    engine.handle_preemption()
    loader = engine.dataloader(
        corpus, global_batch_size=options.global_batch, lengths="lengths", seed=options.seed,
        steps=options.train_steps,
    )  # fmt: skip
    if options.resume:
        found = load_checkpoint(engine, loader, checkpoints, allow_previous=options.allow_previous)
        say(
            f"resumed after {found} steps" if found is not None else "no checkpoint: from the start"
        )
    status = 0
    log = StepLog(options.out / "steps.jsonl", engine.world, after=loader.position)
    for step in loader:
        for mb in step:
            mb.backward(loss_sum(model(**mb.inputs), mb.labels))
        loss = step.finish()
        log.write(step, loss)
        say(f"step {step.index}: loss {loss:.5f}")
        done = step.index + 1
        if engine.stop_requested or done % options.checkpoint_every == 0 or done == len(loader):
            folder = save_checkpoint(engine, loader, checkpoints)
            say(f"wrote {folder}")
        if engine.stop_requested:
            say("stopped by a signal; --resume goes on from here")
            status = STOP_STATUS
            break
    engine.close()
    return status


def _profile(
    options: TrainOptions, checkpoints: Path, fitted: Callable[[], CostProfile]
) -> CostProfile:
    """A resumed run's own profile, else a fresh fit written to OUT/cost.json."""
    world = DataWorld()
    try:
        path = options.out / "cost.json"
        resuming = options.resume and path.exists() and bool(whole_checkpoints(checkpoints))
        resuming = gather_bytes(world, b"1" if resuming else b"0")[0] == b"1"
        if resuming:
            return load(path)
        profile = fitted() if options.cost is None else load(options.cost)
        if world.rank == 0:
            options.out.mkdir(parents=True, exist_ok=True)
            path.write_text(dumps(profile))
        gather_bytes(world, b"")  # nobody reads the file before it is there
        return profile
    finally:
        world.close()


class StepLog:
    """Rank 0's OUT/steps.jsonl; lines of steps at or after `after` (to be repeated) are cut off."""

    def __init__(self, path: Path, world: DataWorld, *, after: int) -> None:
        self.path, self.world = path, world
        if world.rank != 0:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        old = path.read_text().splitlines() if path.exists() and after else []
        kept = [line for line in old if json.loads(line)["step"] < after]
        path.write_text("".join(line + "\n" for line in kept))

    def write(self, step: Any, loss: float) -> None:
        if self.world.rank != 0:
            return
        line = {
            "step": step.index,
            "digest": digest(step.plan),
            "loss": loss,
            "tokens": step.tokens,
            "samples": step.indices,
            "planner_exposed_ms": round(step.metrics["planner_exposed_ms"], 3),
        }
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
