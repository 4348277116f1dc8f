"""Plan and replay: every strategy on every step of every seed."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from megatron_dcp.cli.simulate.options import SimulateOptions
from megatron_dcp.cost import CostProfile
from megatron_dcp.errors import ConfigError, PlanError
from megatron_dcp.plan import StepPlan, Workload
from megatron_dcp.planner import PlanRequest, make_plan, strategy_names
from megatron_dcp.planner.registry import find_strategy
from megatron_dcp.sim import replay
from megatron_dcp.sim.compare import BASELINES, Tally

Progress = Callable[[str], None]


@dataclass(slots=True, kw_only=True)
class Study:
    """Tallies by strategy, and for the report one plan and the lengths of the first step."""

    tallies: dict[str, Tally]
    plans: dict[str, StepPlan] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)
    degrees: dict[str, list[tuple[int, int]]] = field(default_factory=dict)


def asked(options: SimulateOptions) -> list[str]:
    """Strategies to show; names are checked before anything runs."""
    if options.strategies == "all":
        return strategy_names()
    names = [s.strip() for s in options.strategies.split(",") if s.strip()]
    if not names:
        raise ConfigError("--strategies names no strategy; use names separated by commas, or all")
    for name in names:
        find_strategy(name)
    return list(dict.fromkeys(names))


def with_baselines(names: list[str]) -> list[str]:
    """Speedups are against the bare baselines, so these run even where they are not shown."""
    known = set(strategy_names())
    return [*names, *(b for b in BASELINES if b in known and b not in names)]


def run_study(options: SimulateOptions, names: list[str], progress: Progress) -> Study:
    """Raises ConfigError for unusable options; a strategy's PlanError stands in its tally."""
    profile = options.profile()
    study = Study(tallies={name: Tally(name=name) for name in names})
    seeds = range(options.seed, options.seed + options.seeds)
    batches = [(s, step, w) for s in seeds for step, w in enumerate(options.workloads(s))]
    study.lengths = [n for s, _, w in batches if s == options.seed for n in w.lengths]
    batches.sort(key=lambda b: b[1])  # a strategy that is cut short has seen all seeds alike
    end = time.perf_counter() + (options.limit_s or math.inf)
    for done, name in enumerate(names):
        limit = options.plan_limit_s
        if limit is None:
            limit = (end - time.perf_counter()) / (len(names) - done)
        _run_strategy(options, profile, name, batches, study, progress, limit)
    return study


def _run_strategy(
    options: SimulateOptions,
    profile: CostProfile,
    name: str,
    batches: list[tuple[int, int, Workload]],
    study: Study,
    progress: Progress,
    limit_s: float,
) -> None:
    tally, begin = study.tallies[name], time.perf_counter()
    sampler = {s: options.replay_options(s) for s in {seed for seed, _, _ in batches}}
    degrees = study.degrees.setdefault(name, [])
    for done, (seed, step, workload) in enumerate(batches):
        if done and time.perf_counter() - begin > limit_s:
            progress(f"{name}: stopped after {done} of {len(batches)} steps (time limit)")
            break
        rounded = workload.rounded(options.shape_quantum)
        request = PlanRequest(
            workload=rounded, topology=options.topology, profile=profile,
            lockstep=options.domain, step=step, recompute=options.recompute != "off",
        )  # fmt: skip
        try:
            plan = make_plan(request, name)
        except PlanError as error:
            tally.failed = str(error)
            progress(f"{name}: seed {seed} step {step}: {error}")
            break
        keep = name not in study.plans
        settings = replace(sampler[seed], keep_spans=keep)
        padding = rounded.tokens - workload.tokens
        tally.add((seed, step), plan, replay(plan, profile, settings), padding)
        if keep:
            study.plans[name] = plan
        if seed == options.seed:
            degrees.extend((workload.lengths[i], p.degree) for p in plan.placements
                           for i in p.samples)  # fmt: skip
    progress(f"{name}: {len(tally.step_us)} steps in {time.perf_counter() - begin:.1f} s")


def to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
