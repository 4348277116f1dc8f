"""A run directory: its plan files; reading summary, plans and events as measured steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dcp.errors import ConfigError
from megatron_dcp.observe.events import Event, read_events
from megatron_dcp.observe.shares import Shares, step_shares
from megatron_dcp.observe.summary import load_summary
from megatron_dcp.plan import StepPlan, dumps, load


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """One run of one step of one strategy: its plan (None where none was kept) and its events."""

    strategy: str
    step: int
    occurrence: int
    plan: StepPlan | None
    events: tuple[Event, ...]

    @property
    def shares(self) -> Shares:
        return step_shares(self.events)[self.step]

    @property
    def start_us(self) -> int:
        return int(min(e["start_us"] for e in self.events if e["kind"] == "step"))

    def of(self, kind: str) -> list[Event]:
        return [e for e in self.events if e["kind"] == kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Everything that a run directory holds. steps: in order of time; empty where the run wrote no
    events (virtual ranks). plans: by (strategy, step)."""

    path: Path
    summary: dict[str, Any]
    steps: tuple[MeasuredStep, ...]
    plans: Mapping[tuple[str, int], StepPlan]

    def plans_of(self, strategy: str) -> list[StepPlan]:
        return [plan for (name, _), plan in sorted(self.plans.items()) if name == strategy]

    @property
    def strategies(self) -> list[str]:
        return list(self.summary["strategies"])

    def steps_of(self, strategy: str) -> list[MeasuredStep]:
        return [s for s in self.steps if s.strategy == strategy]


def write_plan(run: Path, plan: StepPlan, *, keep: int | None = None) -> Path:
    """Write `<run>/plans/STRATEGY-stepNNNNN.json`; keep: only the last so many steps' stay."""
    folder = run / "plans"
    folder.mkdir(parents=True, exist_ok=True)
    name = plan.strategy.replace(":", "-")
    path = folder / f"{name}-step{plan.step:05d}.json"
    path.write_text(dumps(plan) + "\n")
    if keep is not None:
        (folder / f"{name}-step{plan.step - keep:05d}.json").unlink(missing_ok=True)
    return path


def clear_run(run: Path, *, ranks: int) -> None:
    """Remove what an earlier run left and one on so many ranks does not write over: summary, plans,
    and events of further ranks. A report would take them for this run's."""
    (run / "summary.json").unlink(missing_ok=True)
    for file in (run / "plans").glob("*.json"):
        file.unlink()
    for file in run.glob("events-rank*.jsonl"):
        if int(file.stem.removeprefix("events-rank")) >= ranks:
            file.unlink()


def read_run(path: str | Path) -> Run:
    """Read a run directory. Raises ConfigError (no run there), PlanError (a damaged plan)."""
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a directory; pass the run directory of `mdcp train`")
    summary = load_summary(folder)
    plans: dict[tuple[str, int], StepPlan] = {}
    for file in sorted((folder / "plans").glob("**/*.json")):
        plan = load(file)
        plans[plan.strategy, plan.step] = plan
    names = list(summary["strategies"])
    default = names[0] if len(names) == 1 else "run"
    events = read_events(folder) if any(folder.glob("events-rank*.jsonl")) else []
    grouped = _occurrences(events, default)
    steps = [
        MeasuredStep(
            strategy=strategy, step=step, occurrence=occurrence,
            plan=plans.get((strategy, step)), events=tuple(events),
        )
        for (strategy, step, occurrence), events in grouped.items()
        if any(e["kind"] == "step" for e in events)
    ]  # fmt: skip
    return Run(
        path=folder,
        summary=summary,
        steps=tuple(sorted(steps, key=lambda s: s.start_us)),
        plans=plans,
    )


def _occurrences(events: Sequence[Event], default: str) -> dict[tuple[str, int, int], list[Event]]:
    """Events by (strategy, step, occurrence). Interleaved repeats run the same step again: an
    explicit `repeat` says so, else each rank's k-th `step` event opens its k-th occurrence."""
    out: dict[tuple[str, int, int], list[Event]] = {}
    by_rank: dict[tuple[str, int, int], list[Event]] = {}
    for e in events:
        strategy = str(e.get("strategy", default))
        if "repeat" in e:
            out.setdefault((strategy, int(e["step"]), int(e["repeat"])), []).append(e)
        else:
            by_rank.setdefault((strategy, int(e["step"]), int(e["rank"])), []).append(e)
    for (strategy, step, _), group in by_rank.items():
        ends = sorted(e["end_us"] for e in group if e["kind"] == "step")
        for e in group:
            k = sum(end < e["end_us"] for end in ends)
            out.setdefault((strategy, step, min(k, max(0, len(ends) - 1))), []).append(e)
    return out


def placement_times(step: MeasuredStep) -> list[tuple[float, float]]:
    """(predicted, measured) us of each placement: measured from the last rank's start to the last
    end, so that waiting for a late rank does not count."""
    if step.plan is None:
        return []
    measured: dict[tuple[int, int], list[Event]] = {}
    for e in step.of("placement"):
        measured.setdefault((e["slot"], e["first_rank"]), []).append(e)
    out = []
    for p in step.plan.placements:
        seen = measured.get((p.slot, p.first_rank))
        if seen:
            took = max(e["end_us"] for e in seen) - max(e["start_us"] for e in seen)
            out.append((float(p.time_us), float(took)))
    return out


def measured_makespan_us(step: MeasuredStep) -> float:
    """From the first rank's start of the step to the end of the last placement."""
    ends = [e["end_us"] for e in step.of("placement")]
    return float(max(ends) - step.start_us) if ends else 0.0


def planning_us(step: MeasuredStep) -> tuple[float, float]:
    """(hidden, exposed) planning time of rank 0: exposed is how long it waited for the plan and
    its data before the step, as it measured."""
    plans = [e for e in step.of("plan") if e["rank"] == 0]
    exposed = float(sum(e.get("exposed_us", 0) for e in plans))
    spent = float(sum(e["end_us"] - e["start_us"] for e in plans))
    return max(0.0, spent - exposed), exposed


def idle_by_rank(step: MeasuredStep) -> list[float]:
    """Share of the step in which each rank waited or had not begun or was already done."""
    steps = {int(e["rank"]): e for e in step.of("step")}
    start = min(e["start_us"] for e in steps.values())
    end = max(e["end_us"] for e in steps.values())
    waited = dict.fromkeys(steps, 0)
    for e in step.of("wait"):
        waited[int(e["rank"])] += e["end_us"] - e["start_us"]
    span = max(1, end - start)
    return [
        (waited[r] + (e["start_us"] - start) + (end - e["end_us"])) / span
        for r, e in sorted(steps.items())
    ]
