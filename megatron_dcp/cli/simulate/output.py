"""The table and the JSON object of `mdcp simulate`."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_dcp.cli.simulate.options import SimulateOptions
from megatron_dcp.cli.simulate.sweep import Sweep

COLUMNS = (
    ("step ms", "right"), ("+- std", "right"), ("x bucket", "right"), ("tok/s/rank", "right"),
    ("idle", "right"), ("comm", "right"), ("recomp.", "right"), ("padding", "right"),
    ("plan ms", "right"), ("shapes", "right"), ("groups", "right"),
)  # fmt: skip


def row(name: str, result: Mapping[str, Any]) -> list[str]:
    """One strategy's cells, in the order of COLUMNS."""
    s, d = result["strategies"][name], result["details"][name]
    against = s["speedup_vs"]["bucket"]
    return [
        f"{s['step_ms']['mean']:,.1f}",
        f"{s['step_ms']['std']:,.1f}",
        "-" if against is None else f"{against:.2f}",
        f"{d['tokens_per_s_per_rank']:,.0f}",
        f"{s['idle']:.1%}",
        f"{s['comm']:.1%}",
        f"{s['recompute']:.1%}",
        f"{s['padding']:.2%}",
        f"{s['planner_ms']:.2f}",
        f"{d['shapes']:,}",
        f"{d['communicators']:,}",
    ]


def headline(options: SimulateOptions, cost_name: str) -> str:
    return (
        f"simulated: {options.lengths}, {options.batch} samples a step, {options.steps} steps, "
        f"{options.seeds} seed(s), {options.ranks} ranks in nodes of "
        f"{options.topology.ranks_per_node}, cost {cost_name}, lockstep {options.lockstep}"
    )


def table(result: Mapping[str, Any], names: Sequence[str], title: str, wanted: int) -> str:
    """The table as text. wanted: steps asked for; rows with fewer say so."""
    from rich.console import Console
    from rich.table import Table

    out = Table(title=title, title_justify="left", header_style="bold")
    out.add_column("strategy")
    for column, side in COLUMNS:
        out.add_column(column, justify="right" if side == "right" else "left", no_wrap=True)
    notes = []
    for name in names:
        if name not in result["strategies"]:
            notes.append(f"{name}: no plan: {result['failed'].get(name, 'not run')}")
            continue
        out.add_row(name, *row(name, result))
        steps = result["details"][name]["steps"]
        if steps < wanted:
            why = result["failed"].get(name, "time limit; --limit-s 0 runs all")
            notes.append(f"{name}: {steps} of {wanted} steps ({why})")
    buffer = io.StringIO()
    Console(file=buffer, width=140, highlight=False).print(out)
    return buffer.getvalue() + "".join(f"  {note}\n" for note in notes)


def sweep_table(sweep: Sweep, names: Sequence[str]) -> str:
    """Speedups over `static` at each point of a sweep, with the idle time and communication of the
    first strategy named, as text."""
    lines = [
        f"simulated sweep, {sweep.label}: times faster than static; idle and comm of {names[0]}"
    ]
    head = f"{sweep.axis:>10}" + "".join(f"{n:>11}" for n in names)
    lines.append(head + f"{'idle':>9}{'comm':>9}{'recomp.':>9}")
    for value, result in sweep.points:
        if isinstance(result, str):
            lines.append(f"{value:>10,.10g}  {result}")
            continue
        cells = ""
        for name in names:
            against = result["strategies"].get(name, {}).get("speedup_vs", {}).get("static")
            cells += f"{'-':>11}" if against is None else f"{against:>10.2f}x"
        first = result["strategies"].get(names[0])
        shares = ("idle", "comm", "recompute") if first else ()
        cells += "".join(f"{first[k]:>9.1%}" for k in shares)
        lines.append(f"{value:>10,.10g}{cells}")
    return "\n".join(lines) + "\n"


def shown(result: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The result without the baselines that ran only for the speedups."""
    return {
        **result,
        **{
            part: {n: v for n, v in result[part].items() if n in names}
            for part in ("strategies", "details", "failed")
        },
    }
