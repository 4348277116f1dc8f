"""The report of a run: one self-contained page, PNG figures, and a Perfetto trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_dcp.observe import figures, png
from megatron_dcp.observe.html import Page
from megatron_dcp.observe.lanes import MAX_RANKS, measured_bars, planned_bars, side_by_side
from megatron_dcp.observe.run_dir import (
    MeasuredStep,
    Run,
    idle_by_rank,
    measured_makespan_us,
    placement_times,
    planning_us,
)
from megatron_dcp.observe.shares import peak_by_rank
from megatron_dcp.observe.timeline import draw_step
from megatron_dcp.observe.trace import write_trace
from megatron_dcp.plan.groups import communicators, nccl_bytes

Series = dict[str, list[tuple[float, float]]]


def write_report(run: Run, out: Path, replayed: Series | None = None) -> list[Path]:
    """Write report.html, PNGs and trace.json.gz into `out`; returns their paths.

    replayed: per strategy (simulated, measured) makespan in ms of its steps, where a simulator was
    at hand.
    """
    out.mkdir(parents=True, exist_ok=True)
    what = str(run.summary.get("what", ""))
    page = Page(f"Run report: {run.path.name}", what or "measured run of megatron-dcp")
    _summary(page, run)
    _progress(page, run)
    _data(page, run)
    written: list[Path] = []
    if run.steps:
        written += _measured(page, run, out, replayed)
    else:
        _planned_only(page, run)
    _facts(page, run)
    return [page.write(out / "report.html"), *written]


def _measured(page: Page, run: Run, out: Path, replayed: Series | None) -> list[Path]:
    """Every section that needs events."""
    written = _timelines(page, run, out)
    _idle(page, run)
    written += _prediction(page, run, out)
    if replayed:
        _replayed(page, replayed)
    _planner(page, run)
    _resources(page, run)
    return [*written, write_trace(run, out / "trace.json.gz")]


def _spread(value: Mapping[str, float], digits: int) -> str:
    return f"{value['mean']:,.{digits}f} ± {value['std']:,.{digits}f}"


def _summary(page: Page, run: Run) -> None:
    page.section("Strategies", "Mean and standard deviation; shares are of rank-time.")
    rows = []
    for name, s in run.summary["strategies"].items():
        loss = s.get("loss") or []
        rows.append((
            name,
            _spread(s["tokens_per_s"], 0),
            _spread(s["step_s"], 3),
            f"{s['idle']:.1%}",
            f"{s['comm']:.1%}",
            f"{s['prediction_error']:.1%}",
            f"{max(s['held_bytes']) / 1e6:,.0f}" if s.get("held_bytes") else "-",
            f"{loss[-1]:.5f}" if loss else "-",
        ))  # fmt: skip
    page.table(
        ("strategy", "tokens/s", "step (s)", "idle", "comm", "prediction error", "held peak MB",
         "last loss"),
        rows,
    )  # fmt: skip


def _by_strategy(run: Run) -> dict[str, list[MeasuredStep]]:
    found = {s: run.steps_of(s) for s in dict.fromkeys(x.strategy for x in run.steps)}
    return {name: steps for name, steps in found.items() if steps}


def _progress(page: Page, run: Run) -> None:
    page.section("Progress")
    rate: Series = {}
    for name, steps in _by_strategy(run).items():
        rate[name] = [(float(k), s.shares.tokens / s.shares.step_s) for k, s in enumerate(steps)]
    if rate:
        page.figure(
            figures.lines(rate, "Throughput", "step of the strategy, in order of time", "tokens/s")
        )
    loss: Series = {
        name: [(float(k), float(v)) for k, v in enumerate(s.get("loss") or [])]
        for name, s in run.summary["strategies"].items()
    }
    if any(loss.values()):
        x = "step of the strategy, in order of time"
        page.figure(figures.lines(loss, "Loss", x, "loss", from_zero=False))
    else:
        page.text("The run recorded no loss.")


def _plans(steps: Sequence[MeasuredStep]) -> dict[int, MeasuredStep]:
    """One measured step per planned step."""
    return {s.step: s for s in steps if s.plan is not None}


def _data(page: Page, run: Run) -> None:
    page.section("Data", "Lengths of the steps whose plans were kept.")
    if not run.plans:
        page.note("No plan file is in this run directory (plans/*.json).")
        return
    names = list(dict.fromkeys(strategy for strategy, _ in run.plans))
    lengths = [n for plan in run.plans_of(names[0]) for n in plan.lengths]
    page.figure(figures.length_histogram(lengths, "Sample lengths"))
    for name in names:
        pairs = [(plan.lengths[i], x.degree) for plan in run.plans_of(name)
                 for x in plan.placements for i in x.samples]  # fmt: skip
        page.figure(figures.degrees_by_length(pairs, f"Degree by sample length: {name}"))


def _planned_only(page: Page, run: Run) -> None:
    """Lanes of the first plan of each strategy, for a run without events."""
    page.section("Steps, as planned", "The run recorded no events: nothing measured per rank.")
    for name in dict.fromkeys(strategy for strategy, _ in run.plans):
        plan = run.plans_of(name)[0]
        title = f"{name}, step {plan.step}: planned {plan.makespan_us / 1e3:,.1f} ms"
        page.figure(figures.gantt(planned_bars(plan, ""), title))


def _chosen(steps: Sequence[MeasuredStep]) -> list[tuple[str, MeasuredStep]]:
    """The median and the slowest step among those with a plan."""
    planned = sorted((s for s in steps if s.plan is not None), key=lambda s: s.shares.step_s)
    if not planned:
        return []
    out = [("median", planned[len(planned) // 2])]
    if planned[-1] is not out[0][1]:
        out.append(("slowest", planned[-1]))
    return out


def _timelines(page: Page, run: Run, out: Path) -> list[Path]:
    text = "Per rank the planned lane above the measured one; thin black bars are communication."
    page.section("Steps, planned and measured", text)
    written = []
    for name, steps in _by_strategy(run).items():
        for which, step in _chosen(steps):
            plan = step.plan
            assert plan is not None
            title = f"{name}, step {step.step} ({which}): makespan planned "
            title += f"{plan.makespan_us / 1e3:,.1f} ms, measured "
            title += f"{measured_makespan_us(step) / 1e3:,.1f} ms"
            bars = side_by_side(planned_bars(plan), measured_bars(plan, step.events))
            page.figure(figures.gantt(bars, title))
            if plan.topology.data_ranks > MAX_RANKS:
                page.text(f"{MAX_RANKS} of {plan.topology.data_ranks} ranks are drawn.")
            if which == "median":
                file = out / f"timeline_{name.replace(':', '-')}.png"
                written.append(draw_step(plan, list(step.events), file, title))
    return written


def _idle(page: Page, run: Run) -> None:
    page.section("Idle time", "Share of each step in which a rank waited or had nothing to do.")
    for name, steps in _by_strategy(run).items():
        told = [idle_by_rank(s) for s in steps]
        # A step that the end of the run broke off lacks the events of some rank.
        columns = [c for c in told if len(c) == max(map(len, told))]
        rows = [[100 * c[r] for c in columns] for r in range(len(columns[0]))]
        page.figure(
            figures.heatmap(rows, f"Idle share: {name}", "step, in order of time", "rank", "%")
        )


def _prediction(page: Page, run: Run, out: Path) -> list[Path]:
    text = "Each point is one placement, or the makespan of one step: from its start to the end of "
    page.section("Prediction", text + "its last placement, without reduction and optimizer.")
    placements: Series = {}
    steps_: Series = {}
    for name, steps in _by_strategy(run).items():
        points = [p for s in steps for p in placement_times(s)]
        placements[name] = [(a / 1e3, b / 1e3) for a, b in points if a > 0 and b > 0]
        spans = [(s.plan.makespan_us, measured_makespan_us(s)) for s in steps if s.plan is not None]
        steps_[name] = [(a / 1e3, b / 1e3) for a, b in spans if b > 0]
    if not any(placements.values()):
        page.note("No placement could be matched: plans or placement events are missing.")
        return []
    page.figure(figures.prediction_scatter(placements, "Time of each placement"))
    page.figure(figures.prediction_scatter(steps_, "Makespan of each step"))
    page.table(
        ("strategy", "placements", "median error", "90 % below"),
        [
            (name, len(points), *(f"{x:.1%}" for x in error_quantiles(points)))
            for name, points in placements.items()
            if points
        ],
    )
    return [png.scatter(placements, out / "prediction.png", "Predicted and measured placements")]


def _replayed(page: Page, replayed: Series) -> None:
    page.section(
        "Simulation",
        "The plans replayed by the simulator under the run's cost profile, against the measured "
        "time from the start of the step to the end of its last placement.",
    )
    page.figure(figures.prediction_scatter(replayed, "Simulated and measured makespan"))
    page.table(
        ("strategy", "steps", "median error", "90 % below"),
        [
            (name, len(points), *(f"{x:.1%}" for x in error_quantiles(points)))
            for name, points in replayed.items()
            if points
        ],
    )


def error_quantiles(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Median and 90 % quantile of |predicted / measured - 1|."""
    errors = sorted(abs(a / b - 1.0) for a, b in points)
    return errors[len(errors) // 2], errors[min(len(errors) - 1, int(0.9 * len(errors)))]


def _planner(page: Page, run: Run) -> None:
    page.section(
        "Planner",
        "Time of the planner, and of rank 0's planning thread: hidden while another step runs; "
        "exposed is how long rank 0 waited for plan and data before its steps, as measured.",
    )
    rows = []
    for name, steps in _by_strategy(run).items():
        pairs = [planning_us(s) for s in steps]
        own = [s.plan.info.get("planner_us") for s in steps if s.plan is not None]
        known = [float(x) for x in own if x is not None]
        rows.append((
            name,
            f"{sum(known) / len(known) / 1e3:.2f}" if known else "-",
            f"{sum(p[0] for p in pairs) / len(pairs) / 1e3:.2f}",
            f"{sum(p[1] for p in pairs) / len(pairs) / 1e3:.2f}",
        ))  # fmt: skip
    page.table(("strategy", "planner (ms)", "hidden (ms)", "exposed (ms)"), rows)


def _resources(page: Page, run: Run) -> None:
    page.section(
        "Communicators and memory",
        "Groups: those that the plans name, and those that a rank is in, with what NCCL would keep "
        "for them by its defaults. Predicted: the largest placement. Held: most bytes of any rank "
        "in any step, as its allocator tells on a GPU; on a CPU the resident set, interpreter and "
        "libraries included.",
    )
    rows = []
    ranks: list[tuple[str, str]] = []
    for name, steps in _by_strategy(run).items():
        groups = {
            g for s in _plans(steps).values() if s.plan is not None for g in communicators(s.plan)
        }
        made = max((e.get("groups", 0) for s in steps for e in s.of("step")), default=0)
        predicted = [p.bytes for s in steps if s.plan is not None for p in s.plan.placements]
        seen = peak_by_rank(s.shares.peaks for s in steps)
        if seen:
            ranks.append((name, ", ".join(f"{peak / 1e6:,.1f}" for peak in seen)))
        budget = {s.plan.budget_bytes for s in steps if s.plan is not None}
        rows.append((
            name,
            len(groups),
            f"{made} ({nccl_bytes(made) / 1e6:,.0f})" if made else "-",
            f"{max(predicted) / 1e6:,.1f}" if predicted else "-",
            f"{max(seen) / 1e6:,.1f}" if seen else "not recorded",
            f"{max(budget) / 1e6:,.1f}" if budget else "-",
        ))  # fmt: skip
    page.table(
        ("strategy", "groups besides the world", "groups of a rank (NCCL, MB)",
         "predicted peak MB", "held peak MB", "budget MB"),
        rows,
    )  # fmt: skip
    if ranks:
        page.table(("strategy", "held peak MB of each rank"), ranks)


def _facts(page: Page, run: Run) -> None:
    page.section("Configuration")
    facts: dict[str, Any] = dict(run.summary.get("config") or {})
    for key in ("versions", "hardware", "command"):
        if key in run.summary:
            facts[key] = run.summary[key]
    page.facts({k: _flat(v) for k, v in facts.items()})


def _flat(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    return str(value)
