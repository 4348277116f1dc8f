"""`mdcp train --train-steps N`: one strategy, checkpoints, exact resume, preemption.

Writes OUT/steps.jsonl, one line per finished step (step, plan digest, loss, tokens, planner time
that was exposed), OUT/cost.json and OUT/checkpoints. A resumed run plans with the profile that its
checkpoint names, so that digests and losses go on exactly.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import megatron_dcp as mdcp
from megatron_dcp.cli.train.fused import Fused
from megatron_dcp.cli.train.metrics import RunMetrics
from megatron_dcp.cli.train.model import Gpt, loss_sum
from megatron_dcp.cli.train.options import TrainOptions
from megatron_dcp.cost import CostProfile, dumps, load
from megatron_dcp.data.stdlib import TextCorpus
from megatron_dcp.dist import DataWorld, gather_bytes
from megatron_dcp.plan import digest
from megatron_dcp.runtime.checkpoint import (
    CheckpointError,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
)
from megatron_dcp.runtime.oom import RESTARTED
from megatron_dcp.runtime.preempt import STOP_STATUS
from megatron_dcp.runtime.step import Microbatch


def train_long(
    options: TrainOptions,
    *,
    corpus: TextCorpus,
    model: Gpt,
    fitted: Callable[[], CostProfile],
    fused: Fused,
    say: Any,
) -> int:
    """Train, checkpointing; returns 0, or STOP_STATUS when a signal ended the run early."""
    assert options.train_steps is not None
    steps = options.train_steps
    if os.environ.get(RESTARTED) == "1":
        options = replace(options, resume=True)
    checkpoints = options.out / "checkpoints"
    profile = _profile(options, checkpoints, fitted)
    optimizer = fused.adamw(model.parameters(), options.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    engine = mdcp.initialize(
        model, optimizer, cost=profile, strategy=options.strategy_names[-1], scheduler=scheduler,
        ranks_per_node=options.ranks_per_node, max_grad_norm=1.0, watchdog_s=options.watchdog_s,
        watchdog_dir=str(options.out), measure=options.measured,
    )  # fmt: skip
    engine.wrap_layers(model.layers)
    engine.handle_preemption()
    loader = engine.dataloader(
        corpus, global_batch_size=options.global_batch, lengths="lengths", seed=options.seed,
        steps=options.train_steps, shape_quantum=options.shape_quantum,
    )  # fmt: skip
    if options.resume:
        found = load_checkpoint(engine, loader, checkpoints, allow_previous=options.allow_previous)
        say(
            f"resumed after {found} steps" if found is not None else "no checkpoint: from the start"
        )

    def loss_of(mb: Microbatch) -> torch.Tensor:
        return loss_sum(model(**mb.inputs), mb.labels)

    if options.dry_run:
        peak = loader.dry_run(loss_of)
        engine.take_events()
        say("dry run of the heaviest step: " + (f"{peak / 1e6:.0f} MB" if peak else "it fits"))
    log = StepLog(options.out / "steps.jsonl", engine.world, after=loader.position)
    metrics = RunMetrics(options, engine) if options.measured else None
    while loader.position < len(loader) and not engine.stop_requested:
        for step in loader:
            loss = step.run(loss_of)
            log.write(step, loss)
            say(f"step {step.index}: loss {loss:.5f}")
            if metrics is not None:
                metrics.after_step(step)
            done = step.index + 1
            last = engine.stop_requested or done == len(loader)
            if not last and done % options.checkpoint_every:
                continue
            refitted = metrics.at_checkpoint() if metrics is not None else None
            folder = save_checkpoint(engine, loader, checkpoints)
            say(f"wrote {folder}" + (f", from here on with {refitted}" if refitted else ""))
            if last or refitted:  # what was planned ahead is of the old profile
                break
    if metrics is not None:
        metrics.close()
    engine.close()
    if engine.stop_requested:
        say("stopped by a signal; --resume goes on from here")
        return STOP_STATUS
    return 0


def _profile(
    options: TrainOptions, checkpoints: Path, fitted: Callable[[], CostProfile]
) -> CostProfile:
    """The profile that a resumed run's checkpoint names, else a fresh fit in OUT/cost.json."""
    world = DataWorld()
    try:
        path = options.out / "cost.json"
        mine = ""
        if options.resume and world.rank == 0:
            mine = _profile_of_checkpoint(options, checkpoints)
        resumed = gather_bytes(world, mine.encode())[0].decode()
        if resumed:
            return load(resumed)
        profile = fitted() if options.cost is None else load(options.cost)
        if world.rank == 0:
            options.out.mkdir(parents=True, exist_ok=True)
            path.write_text(dumps(profile))
        gather_bytes(world, b"")  # nobody reads the file before it is there
        return profile
    finally:
        world.close()


def _profile_of_checkpoint(options: TrainOptions, checkpoints: Path) -> str:
    """File of the profile that the newest checkpoint was planned with; "" where there is none."""
    path = options.out / "cost.json"
    try:
        found = newest_checkpoint(checkpoints, allow_previous=options.allow_previous)
        if found is None:
            return ""
        refitted = options.out / f"cost-{found[1]['engine']['cost']['digest']}.json"
        path = refitted if refitted.exists() else path
    except CheckpointError:
        pass  # loading it says what is wrong, on every rank
    return str(path) if path.exists() else ""


class StepLog:
    """Rank 0's OUT/steps.jsonl; lines of steps at or after `after` (to be repeated) are cut off."""

    def __init__(self, path: Path, world: DataWorld, *, after: int) -> None:
        self.path, self.world = path, world
        if world.rank != 0:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        # A last line without its end was cut when the run was killed; its step is repeated.
        old = path.read_text().rpartition("\n")[0].splitlines() if path.exists() and after else []
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
