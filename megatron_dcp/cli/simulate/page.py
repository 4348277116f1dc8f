"""The report of `mdcp simulate --out DIR`: index.html, simulate.json, plans and PNG figures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_dcp.cli.simulate.options import SimulateOptions
from megatron_dcp.cli.simulate.output import COLUMNS, row
from megatron_dcp.cli.simulate.study import Study
from megatron_dcp.cli.simulate.sweep import Sweep
from megatron_dcp.observe import figures, png
from megatron_dcp.observe.html import Page
from megatron_dcp.observe.lanes import MAX_RANKS, planned_bars, shown_ranks
from megatron_dcp.plan import dumps

SHARE_NAMES = {
    "compute": "compute", "recompute": "recompute", "comm_inside": "communication in node",
    "comm_across": "communication across nodes", "gathers": "gathers", "reduction": "reduction",
    "overhead": "overhead", "idle": "idle",
}  # fmt: skip


def write_report(
    options: SimulateOptions,
    study: Study,
    result: Mapping[str, Any],
    sweeps: list[Sweep],
    title: str,
) -> Path:
    """Write the folder; returns the page's path."""
    assert options.out is not None
    folder = options.out
    (folder / "plans").mkdir(parents=True, exist_ok=True)
    (folder / "simulate.json").write_text(json.dumps(result, indent=1) + "\n")
    names = list(result["strategies"])
    for name in names:
        file = folder / "plans" / f"{name.replace(':', '-')}.json"
        file.write_text(dumps(study.plans[name]))
    page = Page("Simulated comparison of strategies", title)
    page.note(
        "Every number on this page is simulated: plans are replayed in a discrete-event loop under "
        f"the cost profile {options.profile().name}. See docs/cost_model.md for its terms."
    )
    _comparison(page, result, names)
    _data(page, study, names)
    _plans(page, options, study, names)
    for sweep in sweeps:
        _sweep(page, sweep, names, folder)
    _options(page, options, result)
    times = {
        n: (v["step_ms"]["mean"], v["step_ms"]["std"]) for n, v in result["strategies"].items()
    }
    if times:
        png.bars(times, folder / "step_times.png", "Simulated step time", "step time (ms)")
    return page.write(folder / "index.html")


def _comparison(page: Page, result: Mapping[str, Any], names: list[str]) -> None:
    page.section("Strategies", "Means over all steps and seeds; shares are of rank-time.")
    page.table(
        ("strategy", *(c for c, _ in COLUMNS), "gap to bound"),
        [(n, *row(n, result), f"{result['details'][n]['gap']:.1%}") for n in names],
    )
    for name, why in result["failed"].items():
        page.note(f"{name}: {why}")
    if not names:
        return
    strategies, details = result["strategies"], result["details"]
    page.figure(
        figures.step_times(
            {n: (strategies[n]["step_ms"]["mean"], strategies[n]["step_ms"]["std"]) for n in names},
            "Simulated step time",
        )
    )
    page.figure(
        figures.shares(
            {
                n: {label: details[n][f"share_{key}"] for key, label in SHARE_NAMES.items()}
                for n in names
            },
            "Where the rank-time goes",
        )
    )


def _data(page: Page, study: Study, names: list[str]) -> None:
    page.section("Data", "Lengths of the first seed, and the degree that each strategy gave them.")
    page.figure(figures.length_histogram(study.lengths, "Sample lengths"))
    for name in names:
        pairs = study.degrees[name]
        page.figure(figures.degrees_by_length(pairs, f"Degree by sample length: {name}"))


def _plans(page: Page, options: SimulateOptions, study: Study, names: list[str]) -> None:
    text = "One lane per rank, colour by degree, as planned."
    if options.ranks > MAX_RANKS:
        text += f" {MAX_RANKS} of {options.ranks} ranks are drawn."
    page.section("First step", text)
    for name in names:
        plan = study.plans[name]
        title = f"{name}: makespan {plan.makespan_us / 1e3:,.1f} ms, bound "
        title += f"{plan.lower_bound_us / 1e3:,.1f} ms"
        lanes = [f"rank {r}" for r in shown_ranks(options.ranks)]
        page.figure(figures.gantt(planned_bars(plan, ""), title, lanes))


def _sweep(page: Page, sweep: Sweep, names: list[str], folder: Path) -> None:
    page.section(f"Sweep: {sweep.axis}", "Up to 3 steps of one seed at each point.")
    usable = [(v, r) for v, r in sweep.points if not isinstance(r, str)]
    for value, reason in ((v, r) for v, r in sweep.points if isinstance(r, str)):
        page.note(f"{sweep.label} = {value:g}: {reason}")
    rate: dict[str, list[tuple[float, float]]] = {}
    ratio: dict[str, list[tuple[float, float]]] = {}
    for value, r in usable:
        for n in names:
            if n not in r["strategies"]:
                page.note(f"{n} at {value:g}: {r['failed'].get(n, 'no plan')}")
                continue
            rate.setdefault(n, []).append((value, r["details"][n]["tokens_per_s_per_rank"]))
            against = r["strategies"][n]["speedup_vs"]["static"]
            if against is not None:
                ratio.setdefault(n, []).append((value, against))
    title = f"Simulated throughput over {sweep.axis}"
    page.figure(figures.lines(rate, title, sweep.label, "tokens/s per rank", log_x=True))
    title = f"Speedup over static, by {sweep.axis}"
    page.figure(figures.lines(ratio, title, sweep.label, "times faster than static", log_x=True))
    png.curves(ratio, folder / f"sweep_{sweep.axis}.png", title + " (simulated)", sweep.label,
               "times faster than static")  # fmt: skip


def _options(page: Page, options: SimulateOptions, result: Mapping[str, Any]) -> None:
    page.section("Options")
    facts = {n: getattr(options, n) for n in options.__dataclass_fields__}
    facts["largest |replay / plan - 1|"] = max(
        (d["prediction_error"] for d in result["details"].values()), default=0.0
    )
    page.facts({k: v for k, v in facts.items() if v is not None})
