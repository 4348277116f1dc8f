"""What a set of events shows of a step: its time, idle and communication shares, peak memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_dcp.observe.events import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Fractions of rank-time (ranks * step time); step_s: seconds per step, slowest rank.

    peaks: most bytes that each rank held, in order of ranks; empty where no rank could tell.
    """

    step_s: float
    idle: float
    comm: float
    tokens: int
    peaks: tuple[int, ...] = ()


def step_shares(events: Iterable[Event]) -> dict[int, Shares]:
    """Per step number. Idle is rank-time spent waiting (`wait`) or with nothing to do: the step
    lasts from the first start to the last end over ranks; communication is `comm` + `reduce`."""
    by_step: dict[int, list[Event]] = {}
    for event in events:
        by_step.setdefault(int(event["step"]), []).append(event)
    return {step: _one_step(group) for step, group in sorted(by_step.items())}


def _one_step(events: list[Event]) -> Shares:
    steps = [e for e in events if e["kind"] == "step"]
    start, end = min(e["start_us"] for e in steps), max(e["end_us"] for e in steps)
    span = max(end - start, 1) * len(steps)
    total = {"wait": 0, "comm": 0, "reduce": 0}
    for e in events:
        if e["kind"] in total:
            total[e["kind"]] += e["end_us"] - e["start_us"]
    unused = sum((e["start_us"] - start) + (end - e["end_us"]) for e in steps)
    tokens = sum(
        e["tokens"] for e in events if e["kind"] == "placement" and e["rank"] == e["first_rank"]
    )
    return Shares(
        step_s=(end - start) / 1e6,
        idle=(total["wait"] + unused) / span,
        comm=(total["comm"] + total["reduce"]) / span,
        tokens=tokens,
        peaks=tuple(e["bytes"] for e in sorted(steps, key=_rank) if "bytes" in e),
    )


def peak_by_rank(peaks: Iterable[tuple[int, ...]]) -> list[int]:
    """Most bytes that each rank held in any of the steps of which all ranks told; else empty."""
    told = list(peaks)
    whole = [p for p in told if len(p) == max(map(len, told))]
    return [max(rank) for rank in zip(*whole, strict=True)]


def _rank(event: Event) -> int:
    return int(event["rank"])
