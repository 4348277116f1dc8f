"""A run directory in the layout that `mdcp train` writes, with times from a noisy replay."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_dcp.cost import dumps as dump_profile
from megatron_dcp.observe.events import EventWriter
from megatron_dcp.observe.summary import RunSummary, StepRecord
from megatron_dcp.plan import Topology, dumps
from megatron_dcp.sim import Noise, ReplayOptions, replay

_SPEC = importlib.util.spec_from_file_location(
    "sim_plans", Path(__file__).parents[1] / "sim" / "conftest.py"
)
sim_plans = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(sim_plans)


def _events(plan, outcome, origin, rank):
    """The events of one rank: wait before each placement, communication at its end."""
    base = {"rank": rank, "step": plan.step}
    last = 0
    for span in outcome.spans:
        p = plan.placements[span.placement]
        if rank not in p.ranks:
            continue
        start, end = int(span.start_us), int(span.end_us)
        if start > last:
            yield {**base, "kind": "wait", "start_us": origin + last, "end_us": origin + start}
        more = {
            "slot": p.slot,
            "first_rank": p.first_rank,
            "degree": p.degree,
            "scheme": p.scheme,
            "recompute": p.recompute,
            "tokens": plan.tokens_of(p),
        }
        yield {**base, "kind": "placement", "start_us": origin + start, "end_us": origin + end,
               **more}  # fmt: skip
        if p.degree > 1:
            yield {**base, "kind": "comm", "start_us": origin + (start + end) // 2,
                   "end_us": origin + end}  # fmt: skip
        last = end
    span_us = int(outcome.makespan_us)
    yield {**base, "kind": "plan", "start_us": origin - 90, "end_us": origin + 10,
           "exposed_us": 10}  # fmt: skip
    yield {**base, "kind": "reduce", "start_us": origin + span_us, "end_us": origin + span_us + 50}
    yield {**base, "kind": "step", "start_us": origin, "end_us": origin + span_us + 50,
           "bytes": 10**6 * (100 + 10 * rank + plan.step), "groups": 2 + plan.step}  # fmt: skip


def write_run(folder, ranks=4, steps=3, repeats=2):
    profile = sim_plans.simple_profile()
    topology = Topology(data_ranks=ranks, ranks_per_node=ranks)
    summary = RunSummary("test data from a noisy replay", {"hidden": 128, "versions": "none"})
    writers = [EventWriter(folder, r) for r in range(ranks)]
    (folder / "plans").mkdir()
    (folder / "cost.json").write_text(dump_profile(profile))
    clock = 1_000_000
    for repeat in range(repeats):
        for offset, strategy in enumerate(("packed:2", "dcp")):
            for step in range(steps):
                plan = sim_plans.random_plan(profile, topology, 7 * step + offset)
                plan = replace(plan, step=step, strategy=strategy, info={"planner_us": 300})
                noise = Noise(slot=0.05, seed=repeat)
                outcome = replay(plan, profile, ReplayOptions(noise=noise, keep_spans=True))
                for rank, writer in enumerate(writers):
                    writer.write(_events(plan, outcome, clock, rank), strategy=strategy)
                clock += int(outcome.makespan_us) + 500
                name = f"{strategy.replace(':', '-')}-{step}.json"
                (folder / "plans" / name).write_text(dumps(plan))
                summary.add(strategy, StepRecord(
                    repeat=repeat, tokens=plan.workload.tokens, step_s=outcome.makespan_us / 1e6,
                    predicted_s=plan.makespan_us / 1e6, idle=0.1, comm=0.05,
                    loss=5.0 - 0.1 * step, held=(10**8 + step, 2 * 10**8)))  # fmt: skip
    for writer in writers:
        writer.close()
    summary.write(folder)
    return folder


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    return write_run(folder)
