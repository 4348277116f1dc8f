"""Interleaved repeats over contenders: A B C A B C ..., every step measured alike.

What is predicted for a step is the simulator's replay of its plan plus the tail (reduction,
optimizer), which is taken from a warm-up step that is not recorded. Rank 0 writes plans, timelines
and summary into the run directory, every rank its events.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_dcp.cost import CostProfile
from megatron_dcp.cost import dumps as dump_profile
from megatron_dcp.dist import DataWorld, gather_bytes
from megatron_dcp.errors import MdcpError
from megatron_dcp.observe.events import EventWriter
from megatron_dcp.observe.run_dir import clear_run, write_plan
from megatron_dcp.observe.shares import step_shares
from megatron_dcp.observe.summary import RunSummary, StepRecord
from megatron_dcp.observe.timeline import draw_step
from megatron_dcp.plan import StepPlan
from megatron_dcp.runtime.contender import Contender, StepRun
from megatron_dcp.runtime.memory import PeakMemory
from megatron_dcp.sim import replay


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """repeats: rounds over all contenders. steps: of each in a round. memory: measure the peak of
    one more step of each, which is not timed: free heap is given back before it, so its pages
    fault again. draw: whose last step is drawn; None: everybody's.
    """

    repeats: int
    steps: int = 1
    memory: bool = False
    draw: tuple[str, ...] | None = None


def interleave(
    contenders: Sequence[Contender],
    repeats: Repeats,
    *,
    world: DataWorld,
    profile: CostProfile,
    out: Path,
    what: str,
    config: Mapping[str, Any],
    say: Any,
) -> RunSummary:
    """Run the comparison. A contender whose plan or step is refused is left out, with the reason;
    the others go on."""
    writer = EventWriter(out, world.rank)
    if world.rank == 0:
        clear_run(out, ranks=world.size)
        (out / "cost.json").write_text(dump_profile(profile))
    summary = RunSummary(what=what, config=config)
    drawn: dict[str, tuple[StepPlan, list[dict[str, Any]]]] = {}
    tails: dict[str, float] = {}
    for repeat in range(-1, repeats.repeats):  # -1: the warm-up
        for contender in contenders:
            name = contender.name
            for _ in range(repeats.steps if repeat >= 0 else 1):
                if name in summary.failed:
                    continue
                try:
                    run = contender.run_step()
                except MdcpError as error:
                    summary.failed[name] = str(error)
                    say(f"{name}: {error}")
                    continue
                everyone = _gather(world, run)
                if repeat < 0:
                    tails[name] = _tail_us(everyone)
                    continue
                writer.write(run.events, strategy=name)
                summary.add(name, _record(repeat, run, everyone, tails[name], profile))
                if world.rank == 0:
                    write_plan(out, run.plan)
                    if repeats.draw is None or name in repeats.draw:
                        drawn[name] = (run.plan, everyone)
            if repeat >= 0:
                say(f"repeat {repeat + 1}/{repeats.repeats}: {name}")
    if repeats.memory:
        for contender in contenders:
            if contender.name not in summary.failed:
                summary.peak(contender.name, _peak(world, contender))
    writer.close()
    if world.rank == 0:
        summary.write(out)
        for name, (plan, events) in drawn.items():
            title = f"{name}, step {plan.step}: planned above, measured below ({what})"
            file = "timeline.png" if name == "dcp" else f"timeline-{slug(name)}.png"
            draw_step(plan, events, out / file, title)
    return summary


def _gather(world: DataWorld, run: StepRun) -> list[dict[str, Any]]:
    """Events of all ranks, on every rank."""
    return [e for b in gather_bytes(world, json.dumps(run.events).encode()) for e in json.loads(b)]


def _peak(world: DataWorld, contender: Contender) -> int | None:
    """Largest rise of a rank's memory within a step, bytes; None: it cannot be told."""
    before = PeakMemory(world.device)
    contender.run_step()
    mine = json.dumps(before.peak_bytes()).encode()
    return max((p for b in gather_bytes(world, mine) if (p := json.loads(b)) is not None),
               default=None)  # fmt: skip


def _tail_us(events: Sequence[Mapping[str, Any]]) -> float:
    """Reduction and optimizer of the slowest rank."""
    by_rank: dict[int, float] = {}
    for e in events:
        if e["kind"] in ("reduce", "optimizer"):
            by_rank[e["rank"]] = by_rank.get(e["rank"], 0.0) + e["end_us"] - e["start_us"]
    return max(by_rank.values(), default=0.0)


def _record(
    repeat: int,
    run: StepRun,
    events: Sequence[Mapping[str, Any]],
    tail_us: float,
    profile: CostProfile,
) -> StepRecord:
    (shares,) = step_shares(events).values()
    replayed = replay(run.plan, profile)
    # Made between the timed steps: what would be left were it made while the step before runs.
    left = max(0.0, run.planner_ms - shares.step_s * 1e3)
    record = StepRecord.of(run.plan, shares, loss=run.loss, repeat=repeat)
    return replace(
        record,
        predicted_s=(replayed.makespan_us + tail_us) / 1e6,
        recompute=replayed.share("recompute"),
        planner_ms=run.planner_ms,
        exposed_ms=left if run.exposed_ms is None else run.exposed_ms,
    )


def slug(strategy: str) -> str:
    """A strategy's name in file names."""
    return strategy.replace(":", "-")
