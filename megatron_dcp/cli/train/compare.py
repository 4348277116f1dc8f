"""Train one model per strategy on the same samples, in interleaved repeats, and measure each step.

Every strategy has its own copy of the model, optimizer and engine with equal seeds, so the losses
must agree to rounding. A step begins with a rendezvous of all ranks; what the plan predicts for it
is its makespan plus the tail (reduction, optimizer), which is taken from the warm-up step.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import megatron_dcp as mdcp
from megatron_dcp.cli.train.model import Gpt, loss_sum
from megatron_dcp.cli.train.options import TrainOptions
from megatron_dcp.cost import CostProfile
from megatron_dcp.cost import dumps as dump_profile
from megatron_dcp.data.stdlib import TextCorpus
from megatron_dcp.dist import DataWorld, LinkPacer, gather_bytes
from megatron_dcp.observe.events import EventWriter
from megatron_dcp.observe.run_dir import write_plan
from megatron_dcp.observe.shares import step_shares
from megatron_dcp.observe.summary import RunSummary, StepRecord
from megatron_dcp.observe.timeline import draw_step
from megatron_dcp.plan import StepPlan


@dataclass(slots=True)
class _Runner:
    """One strategy: its model, engine and position in the data."""

    name: str
    model: Gpt
    engine: Any
    steps: Iterator[Any]
    tail_us: float = 0.0

    def run_step(self) -> tuple[Any, float, list[dict[str, Any]]]:
        """(finished step, loss, this rank's events)."""
        step = next(self.steps)
        for mb in step:
            mb.backward(loss_sum(self.model(**mb.inputs), mb.labels))
        loss = step.finish()
        return step, loss, self.engine.take_events()


def compare(
    options: TrainOptions,
    *,
    out: Path,
    what: str,
    strategies: list[str],
    corpus: TextCorpus,
    model: Gpt,
    profile: CostProfile,
    link_bytes_per_s: float | None,
    say: Any,
) -> RunSummary:
    """Run the comparison; rank 0 writes everything into `out`."""
    world = DataWorld()
    writer = EventWriter(out, world.rank)
    if world.rank == 0:
        (out / "cost.json").write_text(dump_profile(profile))
    runners = [_runner(options, s, corpus, model, profile, link_bytes_per_s) for s in strategies]
    for runner in runners:
        _warm_up(world, runner)
    summary = RunSummary(what=what, config=_config(options, world, corpus, link_bytes_per_s))
    drawn: dict[str, tuple[StepPlan, list[dict[str, Any]]]] = {}
    for repeat in range(options.repeats):
        for runner in runners:
            for _ in range(options.steps):
                step, loss, events = runner.run_step()
                writer.write(events, strategy=runner.name)
                everyone = _gather(world, events)
                shares = step_shares(everyone)[step.index]
                record = StepRecord.of(
                    step.plan, shares, loss=loss, repeat=repeat, tail_us=runner.tail_us
                )
                summary.add(runner.name, record)
                if world.rank == 0:
                    write_plan(out, step.plan)
                    drawn[runner.name] = (step.plan, everyone)
            say(f"repeat {repeat + 1}/{options.repeats}: {runner.name}")
    writer.close()
    for runner in runners:
        runner.engine.close()
    if world.rank == 0:
        summary.write(out)
        for name, (plan, events) in drawn.items():
            title = f"{name}, step {plan.step}: planned above, measured below ({what})"
            file = "timeline.png" if name == "dcp" else f"timeline-{name.replace(':', '-')}.png"
            draw_step(plan, events, out / file, title)
    world.close()
    return summary


def _runner(
    options: TrainOptions,
    strategy: str,
    corpus: TextCorpus,
    model: Gpt,
    profile: CostProfile,
    link_bytes_per_s: float | None,
) -> _Runner:
    own = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(own.parameters(), lr=options.lr, weight_decay=0.1)
    engine = mdcp.initialize(
        own,
        optimizer,
        cost=profile,
        strategy=strategy,
        ranks_per_node=options.ranks_per_node,
        measure=True,
    )
    engine.wrap_layers(own.layers)
    if link_bytes_per_s is not None:
        engine.world.wire.pacer = LinkPacer(link_bytes_per_s)
    loader = engine.dataloader(
        corpus, global_batch_size=options.global_batch, lengths="lengths", seed=options.seed
    )
    return _Runner(name=strategy, model=own, engine=engine, steps=iter(loader))


def _warm_up(world: DataWorld, runner: _Runner) -> None:
    """One unrecorded step: warms allocators and groups, and measures the tail of a step."""
    _, _, events = runner.run_step()
    tail = sum(e["end_us"] - e["start_us"] for e in events if e["kind"] in ("reduce", "optimizer"))
    tails = [json.loads(b) for b in gather_bytes(world, json.dumps(tail).encode())]
    runner.tail_us = max(tails)


def _gather(world: DataWorld, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Events of all ranks, on every rank."""
    return [e for b in gather_bytes(world, json.dumps(events).encode()) for e in json.loads(b)]


def _config(
    options: TrainOptions, world: DataWorld, corpus: TextCorpus, link: float | None
) -> dict[str, Any]:
    return {
        "ranks": world.size,
        "global_batch": options.global_batch,
        "max_length": options.max_length,
        "clipped_samples": corpus.clipped,
        "seed": options.seed,
        "repeats": options.repeats,
        "steps_per_repeat": options.steps,
        "scale_model": options.scale_model,
        "link_mbytes_per_s": None if link is None else round(link / 1e6, 3),
        "memory_tokens": options.budget_tokens,
        "corpus": corpus.name,
    }
