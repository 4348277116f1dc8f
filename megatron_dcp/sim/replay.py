"""Replay of one plan: placements become tasks of the event loop, the outcome becomes rank time.

What is replayed: compute and exposed communication of each placement on all ranks of its block,
the order of the plan, lockstep slots, pipeline stages (1F1B, interleaved), shared links, noise, and
the gradient reduction at the end. With contention and noise off and one pipeline stage the makespan
equals the plan's to 1 us; with stages it differs by the schedule that the plan's formula only
bounds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from megatron_dcp.cost import CostProfile
from megatron_dcp.cost.model import layers_per_stage
from megatron_dcp.plan import StepPlan
from megatron_dcp.sim.engine import run
from megatron_dcp.sim.graphs import Span, build_graph
from megatron_dcp.sim.options import ReplayOptions
from megatron_dcp.sim.reduction import exposed_us, reduction_us
from megatron_dcp.sim.terms import Array, Terms, terms


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Outcome of one step. Times in us; the shares' base is N ranks * stages * step time.

    step_us = makespan_us + reduction_us (the exposed part; reduction_full_us is all of it).
    compute .. idle: rank-time sums over all ranks, which add up to ranks * stages * step_us.
    """

    makespan_us: float
    reduction_us: float
    reduction_full_us: float
    compute: float
    recompute: float
    comm_inside: float
    comm_across: float
    overhead: float
    gathers: float
    idle: float
    lanes: int
    busy_by_rank: Array
    spans: tuple[Span, ...] = ()

    @property
    def step_us(self) -> float:
        return self.makespan_us + self.reduction_us

    def share(self, *names: str) -> float:
        """Share of rank-time of some of the sums; `comm` is all exposed communication."""
        base = self.lanes * self.step_us
        if not base:
            return 0.0
        values = {
            "comm": self.comm_inside
            + self.comm_across
            + self.gathers
            + self.reduction_us * self.lanes,
        }
        return float(sum(values[n] if n in values else getattr(self, n) for n in names)) / base


def replay(plan: StepPlan, profile: CostProfile, options: ReplayOptions | None = None) -> Replay:
    """Replay one plan under a cost profile. Raises PlanError when the order cannot finish."""
    options = options or ReplayOptions()
    t = terms(plan, profile)
    graph, spans = build_graph(plan, t, options)
    start, end = run(graph)
    makespan = max(end, default=0.0)
    full = reduction_us(plan, profile, options.parameters, options.gradient_bytes)
    begin = _last_backward(plan, t, spans, start, end)
    layers = layers_per_stage(profile, plan.topology)
    exposed = exposed_us(full, makespan, begin, layers, overlap=options.overlap_reduction)
    return _account(plan, t, spans, (start, end), (makespan, exposed, full), options)


def _last_backward(
    plan: StepPlan, t: Terms, spans: list[Span], start: list[float], end: list[float]
) -> float:
    """When the last rank begins the backward of its last microbatch."""
    last: dict[tuple[int, int], int] = {}
    for k, s in enumerate(spans):
        if s.kind == "forward":
            continue
        for r in plan.placements[s.placement].ranks:
            seen = last.get((r, s.stage))
            if seen is None or end[k] >= end[seen]:
                last[r, s.stage] = k
    begin = 0.0
    for k in set(last.values()):
        ahead = 0.0 if spans[k].kind == "backward" else float(t.forward[spans[k].placement])
        begin = max(begin, start[k] + ahead * (end[k] - start[k]))
    return begin


def _account(
    plan: StepPlan,
    t: Terms,
    spans: list[Span],
    ran: tuple[list[float], list[float]],
    outcome: tuple[float, float, float],
    options: ReplayOptions,
) -> Replay:
    """Sum rank-time by what it was spent on. Noise stretches each placement's compute."""
    start, end = ran
    makespan, reduction, full = outcome
    n, p = plan.topology.data_ranks, plan.topology.pipeline_stages
    degree = np.array([x.degree for x in plan.placements], dtype=np.float64)
    took = np.zeros(len(plan.placements))
    busy = np.zeros(n)
    for k, s in enumerate(spans):
        took[s.placement] += end[k] - start[k]
        x = plan.placements[s.placement]
        busy[x.first_rank : x.first_rank + x.degree] += end[k] - start[k]
    wire = t.wire_inside + t.wire_across
    across = np.divide(t.wire_across, wire, out=np.zeros_like(wire), where=wire > 0)
    own = {
        "compute": (t.linear + t.attention) * t.pace,
        "recompute": t.recompute * t.pace,
        "overhead": t.overhead * t.pace,
        "gathers": t.gathers * t.pace,
        "exposed": t.exposed(),
    }
    nominal = np.maximum(sum(own.values(), np.zeros_like(took)), 1e-12)
    if options.contention.on and not options.noise.on:
        # compute is fixed: what a placement took beyond it was communication
        own["exposed"] = np.maximum(took / p - t.compute, 0.0)
        nominal = np.maximum(sum(own.values(), np.zeros_like(took)), 1e-12)
    scale = took * degree / nominal
    sums = {name: float(np.sum(values * scale)) for name, values in own.items()}
    crossing = float(np.sum(own["exposed"] * across * scale))
    lanes = n * p
    return Replay(
        makespan_us=makespan,
        reduction_us=reduction,
        reduction_full_us=full,
        compute=sums["compute"],
        recompute=sums["recompute"],
        comm_inside=sums["exposed"] - crossing,
        comm_across=crossing,
        overhead=sums["overhead"],
        gathers=sums["gathers"],
        idle=lanes * makespan - float(busy.sum()),
        lanes=lanes,
        busy_by_rank=busy,
        spans=tuple(replace(s, start_us=start[k], end_us=end[k]) for k, s in enumerate(spans))
        if options.keep_spans
        else (),
    )
