"""Planned and measured lanes of one step as Gantt bars."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_dcp.observe.events import Event, step_window
from megatron_dcp.observe.figures import Bar
from megatron_dcp.observe.timeline import degree_colours
from megatron_dcp.plan import StepPlan, timeline

MEASURED_COLOURS = {
    "comm": ("communication", "#000000"), "wait": ("waiting", "#DDDDDD"),
    "reduce": ("gradient reduction", "#777777"), "data": ("data", "#BBAACC"),
    "optimizer": ("optimizer", "#AACCBB"), "plan": ("planning", "#FFBBAA"),
}  # fmt: skip
MAX_RANKS = 64


def shown_ranks(ranks: int) -> list[int]:
    """All ranks, or 64 evenly spaced ones of a large fleet."""
    if ranks <= MAX_RANKS:
        return list(range(ranks))
    return [k * ranks // MAX_RANKS for k in range(MAX_RANKS)]


def placement_text(plan: StepPlan, index: int) -> str:
    p = plan.placements[index]
    text = f"slot {p.slot}, {len(p.samples)} samples, {plan.tokens_of(p):,} tokens"
    text += f"<br>degree {p.degree}, {p.scheme}"
    return text + (f", {p.recompute} layers recomputed" if p.recompute else "")


def planned_bars(plan: StepPlan, suffix: str = "planned") -> list[Bar]:
    """One bar per placement and shown rank, at its planned times."""
    colours = degree_colours([p.degree for p in plan.placements])
    shown = set(shown_ranks(plan.topology.data_ranks))
    out = []
    for x in timeline(plan):
        if x.rank in shown:
            p = plan.placements[x.placement]
            out.append(
                Bar(
                    lane=f"rank {x.rank} {suffix}".rstrip(),
                    start_us=x.start_us,
                    end_us=x.end_us,
                    name=f"degree {p.degree}",
                    colour=colours[p.degree],
                    text=placement_text(plan, x.placement),
                )
            )
    return sorted(out, key=lambda b: int(b.lane.split()[1]))


def measured_bars(plan: StepPlan, events: Sequence[Event], suffix: str = "measured") -> list[Bar]:
    """Bars of the events of one step; placements carry the degree's colour, the rest its kind's."""
    colours = degree_colours([p.degree for p in plan.placements])
    shown = set(shown_ranks(plan.topology.data_ranks))
    origin, _ = step_window(events)
    out = []
    for e in sorted(events, key=lambda e: (e["rank"], e["kind"] != "placement", e["start_us"])):
        if e["rank"] not in shown or e["kind"] == "step":
            continue
        if e["end_us"] <= origin:  # planned or read ahead, while an earlier step ran
            continue
        lane = f"rank {e['rank']} {suffix}"
        span = (max(0, e["start_us"] - origin), e["end_us"] - origin)
        if e["kind"] == "placement":
            d = e["degree"]
            text = f"slot {e.get('slot')}, {e.get('tokens', 0):,} tokens<br>degree {d}"
            out.append(
                Bar(lane=lane, start_us=span[0], end_us=span[1], name=f"degree {d}",
                    colour=colours.get(d, "#BBBBBB"), text=text)
            )  # fmt: skip
        else:
            name, colour = MEASURED_COLOURS[e["kind"]]
            thin = e["kind"] == "comm"
            out.append(
                Bar(lane=lane, start_us=span[0], end_us=span[1], name=name, colour=colour,
                    text=name, thin=thin)
            )  # fmt: skip
    return out


def side_by_side(planned: Sequence[Bar], measured: Sequence[Bar]) -> list[Bar]:
    """Rank by rank: the planned lane, then the measured one."""

    def key(pair: tuple[int, Bar]) -> tuple[int, int]:
        return int(pair[1].lane.split()[1]), pair[0]

    tagged = [(0, b) for b in planned] + [(1, b) for b in measured]
    return [b for _, b in sorted(tagged, key=key)]
