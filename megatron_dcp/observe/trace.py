"""Chrome/Perfetto trace of a run: `.json.gz` with one process per rank.

Tracks of a process: `planned` (the plan's replay, aligned to the measured start of the step),
`measured` (steps, and in them placements, waits, reductions), `communication`, and `ahead` (plans
made and data read for a later step). All events are
complete events ("ph": "X") in us; nested ones lie inside their parents, and what would cross a
neighbour's border is cut at it, because viewers refuse events that overlap without nesting.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_dcp.observe.run_dir import MeasuredStep, Run
from megatron_dcp.plan import timeline

PLANNED, MEASURED, COMMUNICATION, AHEAD = 0, 1, 2, 3
_TRACKS = {PLANNED: "planned", MEASURED: "measured", COMMUNICATION: "communication", AHEAD: "ahead"}


_TRACK_OF = {"comm": COMMUNICATION, "plan": AHEAD, "data": AHEAD}


def _complete(name: str, rank: int, track: int, start: float, end: float, **args: Any) -> dict[
    str, Any
]:  # fmt: skip
    return {
        "name": name, "ph": "X", "pid": rank, "tid": track, "ts": start,
        "dur": max(0, end - start), "args": args,
    }  # fmt: skip


def _names(ranks: Sequence[int]) -> Iterator[dict[str, Any]]:
    for rank in ranks:
        yield {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
        yield {"name": "process_sort_index", "ph": "M", "pid": rank, "args": {"sort_index": rank}}
        for track, name in _TRACKS.items():
            yield {"name": "thread_name", "ph": "M", "pid": rank, "tid": track,
                   "args": {"name": name}}  # fmt: skip


def _planned(step: MeasuredStep, origin: int, limit: float) -> Iterator[dict[str, Any]]:
    """The plan's lanes from the measured start on, cut at `limit` where the next step begins."""
    plan = step.plan
    if plan is None:
        return
    start = step.start_us - origin
    for rank in range(plan.topology.data_ranks):
        yield _complete(f"{step.strategy} step {step.step}", rank, PLANNED, start,
                        min(start + plan.makespan_us, limit))  # fmt: skip
    for x in timeline(plan):
        p = plan.placements[x.placement]
        if start + x.start_us < limit:
            yield _complete(
                f"degree {p.degree}", x.rank, PLANNED, start + x.start_us,
                min(start + x.end_us, limit), slot=p.slot, scheme=p.scheme, recompute=p.recompute,
                samples=len(p.samples), tokens=plan.tokens_of(p),
            )  # fmt: skip


def _measured(step: MeasuredStep, origin: int) -> Iterator[dict[str, Any]]:
    for e in step.events:
        start, end = e["start_us"] - origin, e["end_us"] - origin
        if e["kind"] == "step":
            name = f"{step.strategy} step {step.step}"
        elif e["kind"] == "placement":
            name = f"degree {e['degree']}"
        else:
            name = e["kind"]
        track = _TRACK_OF.get(e["kind"], MEASURED)
        known = {"kind", "rank", "start_us", "end_us"}
        args = {k: v for k, v in e.items() if k not in known}
        yield _complete(name, e["rank"], track, start, end, **args)


def _nested(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Cut the end of events that reach past the enclosing one, per track."""
    by_track: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for e in events:
        by_track.setdefault((e["pid"], e["tid"]), []).append(e)
    for group in by_track.values():
        group.sort(key=lambda e: (e["ts"], -e["dur"]))
        open_ends: list[float] = []
        for e in group:
            while open_ends and open_ends[-1] <= e["ts"]:
                open_ends.pop()
            end = e["ts"] + e["dur"]
            if open_ends:
                end = min(end, open_ends[-1])
            e["dur"] = end - e["ts"]
            open_ends.append(end)
    return events


def trace_events(run: Run) -> list[dict[str, Any]]:
    """Metadata and complete events; time starts at the first measured step."""
    if not run.steps:
        return []
    origin = min(int(e["start_us"]) for s in run.steps for e in s.events)
    ranks = sorted({int(e["rank"]) for s in run.steps for e in s.events})
    starts = [float(s.start_us - origin) for s in run.steps]
    events: list[dict[str, Any]] = []
    for s, limit in zip(run.steps, [*starts[1:], float("inf")], strict=True):
        events += _planned(s, origin, limit)
        events += _measured(s, origin)
    return [*_names(ranks), *_nested(events)]


def write_trace(run: Run, path: Path) -> Path:
    """Write `path` (`.json.gz`); equal runs give equal bytes."""
    body = json.dumps({"traceEvents": trace_events(run), "displayTimeUnit": "ms"}).encode()
    path.write_bytes(gzip.compress(body, mtime=0))
    return path
