"""A discrete-event loop over tasks, lanes and shared links. Knows nothing of plans.

A *lane* runs its tasks in order, one at a time. A *task* starts when every lane that holds it has
reached it and every task that it depends on has ended; it then occupies all its lanes for its
duration. A task may move data over one shared *link*: its duration is `compute + max(0, wire/share
- hidden)`, where `share` is the part of full rate that the link gives each of its running tasks
(fair sharing, re-evaluated whenever a task on that link starts or ends).

Invariants: time never goes back; a lane never runs two tasks at once; every task runs exactly once,
or the loop stops with the tasks that wait for each other.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from megatron_dcp.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """The part of a task that shares a link; `demand`: full-rate senders it puts on the link."""

    link: int
    wire: float
    hidden: float
    demand: float = 1.0


@dataclass(slots=True, kw_only=True)
class Graph:
    """Tasks 0..n-1 with duration (us), lanes as ordered lists of tasks, and dependencies.

    after[t]: tasks that wait for t. transfers: where the duration depends on a shared link,
    `duration` then holds the part that no link slows. capacity[link]: full-rate senders it carries.
    """

    duration: list[float]
    lanes: list[list[int]]
    after: list[list[int]] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    transfers: dict[int, Transfer] = field(default_factory=dict)
    capacity: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.after:
            self.after = [[] for _ in self.duration]
        if not self.waits:
            self.waits = [0] * len(self.duration)

    def depend(self, task: int, on: int) -> None:
        """`task` starts only after `on` has ended."""
        self.after[on].append(task)
        self.waits[task] += 1


def run(graph: Graph) -> tuple[list[float], list[float]]:
    """(start, end) of every task, in us from 0."""
    return _Run(graph).go()


class _Run:
    def __init__(self, graph: Graph) -> None:
        n = len(graph.duration)
        self.graph = graph
        self.start = [-1.0] * n
        self.end = [-1.0] * n
        self.missing = list(graph.waits)  # dependencies and lanes that have not arrived
        self.position = [0] * len(graph.lanes)
        self.lanes_of: list[list[int]] = [[] for _ in range(n)]
        for lane, tasks in enumerate(graph.lanes):
            for t in tasks:
                self.lanes_of[t].append(lane)
                self.missing[t] += 1
        self.heap: list[tuple[float, int, int]] = []
        self.version = [0] * n
        self.flows = _Flows(graph) if graph.transfers else None

    def go(self) -> tuple[list[float], list[float]]:
        for t, missing in enumerate(self.missing):
            if not missing:
                self._begin(t, 0.0)
        for lane in range(len(self.position)):
            self._arrive(lane, 0.0)
        done = 0
        heap, version = self.heap, self.version
        while heap:
            now, task, stamp = heapq.heappop(heap)
            if stamp != version[task]:
                continue
            done += 1
            self._finish(task, now)
        if done < len(self.start):
            self._stuck()
        return self.start, self.end

    def _arrive(self, lane: int, now: float) -> None:
        """The lane has ended a task (or begins): it now waits at its next one."""
        tasks = self.graph.lanes[lane]
        if self.position[lane] < len(tasks):
            self._release(tasks[self.position[lane]], now)

    def _release(self, task: int, now: float) -> None:
        self.missing[task] -= 1
        if not self.missing[task]:
            self._begin(task, now)

    def _begin(self, task: int, now: float) -> None:
        self.start[task] = now
        if self.flows is not None and task in self.graph.transfers:
            self._schedule(self.flows.begin(task, now))
        else:
            heapq.heappush(self.heap, (now + self.graph.duration[task], task, self.version[task]))

    def _schedule(self, changed: list[tuple[int, float]]) -> None:
        for task, end in changed:
            self.version[task] += 1
            heapq.heappush(self.heap, (end, task, self.version[task]))

    def _finish(self, task: int, now: float) -> None:
        self.end[task] = now
        if self.flows is not None and task in self.graph.transfers:
            self._schedule(self.flows.finish(task, now))
        for other in self.graph.after[task]:
            self._release(other, now)
        for lane in self.lanes_of[task]:
            self.position[lane] += 1
            self._arrive(lane, now)

    def _stuck(self) -> None:
        waiting = [
            tasks[self.position[lane]]
            for lane, tasks in enumerate(self.graph.lanes)
            if self.position[lane] < len(tasks)
        ]
        raise PlanError(
            f"replay stopped: tasks {sorted(set(waiting))[:8]} wait for each other",
            invariant="order_has_no_cyclic_wait",
            witness=waiting[:8],
        )


class _Flows:
    """Fair sharing of links. A task's progress is a fraction; its speed changes with the share."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.running: list[set[int]] = [set() for _ in graph.capacity]
        self.load = [0.0] * len(graph.capacity)
        self.left: dict[int, float] = {}  # fraction of the task still to do
        self.since: dict[int, float] = {}
        self.length: dict[int, float] = {}  # duration at the present share

    def _duration(self, task: int) -> float:
        x = self.graph.transfers[task]
        share = min(1.0, self.graph.capacity[x.link] / self.load[x.link])
        return self.graph.duration[task] + max(0.0, x.wire / share - x.hidden)

    def begin(self, task: int, now: float) -> list[tuple[int, float]]:
        x = self.graph.transfers[task]
        self.running[x.link].add(task)
        self.left[task], self.since[task], self.length[task] = 1.0, now, 0.0
        return self._rate_change(x.link, x.demand, now, task)

    def finish(self, task: int, now: float) -> list[tuple[int, float]]:
        x = self.graph.transfers[task]
        self.running[x.link].discard(task)
        return self._rate_change(x.link, -x.demand, now, None)

    def _rate_change(
        self, link: int, demand: float, now: float, new: int | None
    ) -> list[tuple[int, float]]:
        """Settle progress at the old share, take the new one; ends of the tasks it changes."""
        before = max(self.load[link], self.graph.capacity[link])
        self.load[link] += demand
        after = max(self.load[link], self.graph.capacity[link])
        if before == after:  # the link is not saturated: nobody else notices
            tasks = [] if new is None else [new]
        else:
            tasks = sorted(self.running[link])
        changed = []
        for t in tasks:
            if t != new and self.length[t] > 0:
                self.left[t] = max(0.0, self.left[t] - (now - self.since[t]) / self.length[t])
            self.since[t] = now
            self.length[t] = self._duration(t)
            changed.append((t, now + self.left[t] * self.length[t]))
        return changed
