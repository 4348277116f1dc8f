"""From a plan and its priced placements to the task graph that the event loop runs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np

from megatron_dcp.plan import StepPlan
from megatron_dcp.sim.engine import Graph, Transfer
from megatron_dcp.sim.options import Contention, Noise, ReplayOptions
from megatron_dcp.sim.pipeline import stage_order
from megatron_dcp.sim.terms import Array, Terms


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One placement (or its forward or backward, with pipeline stages) on its block, us."""

    placement: int
    stage: int
    start_us: float
    end_us: float
    kind: str = "placement"


@dataclass(frozen=True, slots=True)
class Times:
    """Per placement: fixed part, and the transfer on a shared link where there is one."""

    fixed: Array
    forward: Array
    transfers: dict[int, Transfer]
    capacity: list[float]
    dummy: float

    @classmethod
    def of(cls, plan: StepPlan, t: Terms, options: ReplayOptions) -> Times:
        total, factor = t.total(), _noise_factor(plan, options.noise)
        transfers, capacity = _transfers(plan, t, options.contention)
        if options.noise.on:
            total = (t.compute + t.exposed()) * factor
        fixed = total.copy()
        for i in transfers:
            fixed[i] = t.compute[i] * factor[i]
        return cls(fixed, t.forward, transfers, capacity, t.dummy)


def _noise_factor(plan: StepPlan, noise: Noise) -> Array:
    """Factor of each placement: the slowest rank of its block."""
    out = np.ones(len(plan.placements))
    if not noise.on:
        return out
    n = plan.topology.data_ranks
    by_rank = np.random.default_rng([noise.seed, 0]).normal(0.0, 1.0, n) * noise.rank
    draws = np.random.default_rng([noise.seed, 1, plan.step])
    for i, p in enumerate(plan.placements):
        own = by_rank[p.first_rank : p.first_rank + p.degree]
        out[i] = float(np.exp(np.max(own + draws.normal(0.0, 1.0, p.degree) * noise.slot)))
    return out


def _transfers(
    plan: StepPlan, t: Terms, contention: Contention
) -> tuple[dict[int, Transfer], list[float]]:
    """Link 0 is the fabric between nodes, link 1 + node the fast link of a node."""
    if not contention.on:
        return {}, []
    endless = float("inf")
    nodes, m = plan.topology.nodes, plan.topology.ranks_per_node
    fabric = contention.fabric_senders or endless
    capacity = [fabric, *[contention.node_senders or endless] * nodes]
    out = {}
    for i, p in enumerate(plan.placements):
        inside, across, pace = t.wire_inside[i], t.wire_across[i], t.pace[i]
        if across > 0 and contention.fabric_senders is not None:
            hidden = (t.hidden[i] - inside) * pace
            senders = p.degree // m  # one port per node carries the ring
            out[i] = Transfer(link=0, wire=across * pace, hidden=hidden, demand=float(senders))
        elif inside > 0 and contention.node_senders is not None:
            hidden = (t.hidden[i] - across) * pace
            node = 1 + p.first_rank // m
            demand = float(min(p.degree, m))
            out[i] = Transfer(link=node, wire=inside * pace, hidden=hidden, demand=demand)
    return out, capacity


def build_graph(plan: StepPlan, t: Terms, options: ReplayOptions) -> tuple[Graph, list[Span]]:
    """Tasks of a step; spans[k] says what task k is (times still 0)."""
    times = Times.of(plan, t, options)
    if plan.topology.pipeline_stages == 1:
        return _flat_graph(plan, times)
    return _pipeline_graph(plan, times)


def _flat_graph(plan: StepPlan, times: Times) -> tuple[Graph, list[Span]]:
    """One task per placement; lockstep adds a barrier task per domain and slot."""
    lanes: list[list[int]] = [[] for _ in range(plan.topology.data_ranks)]
    for i, p in enumerate(plan.placements):
        for r in p.ranks:
            lanes[r].append(i)
    graph = Graph(
        duration=[float(x) for x in times.fixed],
        lanes=lanes,
        transfers=times.transfers,
        capacity=times.capacity,
    )
    if plan.lockstep > 1:
        _add_barriers(plan, graph)
    spans = [
        Span(placement=i, stage=0, start_us=0.0, end_us=0.0) for i in range(len(plan.placements))
    ]
    return graph, spans


def _add_barriers(plan: StepPlan, graph: Graph) -> None:
    """A domain leaves a slot when its last placement of the slot has ended."""
    domain = plan.lockstep
    open_slot: dict[int, tuple[int, list[int]]] = {}  # domain -> (slot, its tasks)
    barrier: dict[int, int] = {}
    for i, p in enumerate(plan.placements):
        for d in range(p.first_rank // domain, (p.first_rank + p.degree - 1) // domain + 1):
            slot, tasks = open_slot.get(d, (p.slot, []))
            if slot != p.slot:
                barrier[d] = _barrier(graph, tasks)
                tasks = []
            tasks.append(i)
            open_slot[d] = (p.slot, tasks)
            if d in barrier:
                graph.depend(i, barrier[d])


def _barrier(graph: Graph, tasks: list[int]) -> int:
    task = len(graph.duration)
    graph.duration.append(0.0)
    graph.after.append([])
    graph.waits.append(0)
    for t in tasks:
        graph.depend(task, t)
    return task


def _microbatches(plan: StepPlan) -> list[list[int]]:
    """[microbatch][rank]: its placement, or a dummy's number from len(plan.placements) on."""
    work = [[-1] * plan.topology.data_ranks for _ in range(plan.microbatches)]
    for i, x in enumerate(plan.placements):
        work[x.slot][x.first_rank : x.first_rank + x.degree] = [i] * x.degree
    fresh = itertools.count(len(plan.placements))
    return [[next(fresh) if i < 0 else i for i in row] for row in work]


def _pipeline_graph(plan: StepPlan, times: Times) -> tuple[Graph, list[Span]]:
    """A forward and a backward task per placement and chunk, one lane per (rank, stage).

    Slots are the microbatches of the schedule; ranks without a placement in one run a dummy, whose
    tasks come after those of the placements and have no span: its time is idle.
    """
    p, v = plan.topology.pipeline_stages, plan.topology.virtual_stages
    chunks = p * v
    n, count = plan.topology.data_ranks, len(plan.placements)
    work = _microbatches(plan)

    def task(placement: int, chunk: int, backward: bool) -> int:
        return (placement * chunks + chunk) * 2 + int(backward)

    share = times.fixed / v
    duration = [0.0] * (count * chunks * 2)
    spans: list[Span] = []
    transfers: dict[int, Transfer] = {}
    for i in range(count):
        for c in range(chunks):
            for backward in (False, True):
                part = float(1 - times.forward[i] if backward else times.forward[i])
                k = task(i, c, backward)
                duration[k] = float(share[i]) * part
                kind = "backward" if backward else "forward"
                spans.append(Span(placement=i, stage=c % p, start_us=0, end_us=0, kind=kind))
                shared = times.transfers.get(i)
                if shared is not None:
                    part = 0.5 / v
                    transfers[k] = replace(
                        shared, wire=shared.wire * part, hidden=shared.hidden * part
                    )
    dummies = sum(i >= count for row in work for i in row)
    duration += [times.dummy / v * 1 / 3, times.dummy / v * 2 / 3] * (chunks * dummies)
    lanes: list[list[int]] = [[] for _ in range(n * p)]
    for stage in range(p):
        for op in stage_order(stage, p, plan.microbatches, v):
            for r, i in enumerate(work[op.microbatch]):
                lanes[r * p + stage].append(task(i, op.chunk, op.backward))
    graph = Graph(duration=duration, lanes=lanes, transfers=transfers, capacity=times.capacity)
    for i in range(count + dummies):
        for c in range(chunks):
            if c:
                graph.depend(task(i, c, False), task(i, c - 1, False))
                graph.depend(task(i, c - 1, True), task(i, c, True))
        graph.depend(task(i, chunks - 1, True), task(i, chunks - 1, False))
    return graph, spans
