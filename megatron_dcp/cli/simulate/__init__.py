"""`mdcp simulate`: compare strategies over many steps on a cluster that you describe."""

from __future__ import annotations

import json
import sys

from megatron_dcp.cli.outputs import check_folder
from megatron_dcp.cli.simulate.options import SimulateOptions, lengths_of


def main(argv: list[str]) -> int:
    import tyro

    options = tyro.cli(SimulateOptions, args=argv, prog="mdcp simulate")
    if options.presets:
        from megatron_dcp.cost.tables import all_tables

        for title, text in all_tables().items():
            print(f"### {title}\n\n{text}\n")
        return 0
    return simulate(options)


def simulate(options: SimulateOptions) -> int:
    """0 when at least one strategy was simulated, else 1."""
    from megatron_dcp.cli.simulate.output import headline, shown, sweep_table, table
    from megatron_dcp.cli.simulate.study import asked, run_study, to_stderr, with_baselines
    from megatron_dcp.cli.simulate.sweep import check_sweep, run_sweep
    from megatron_dcp.sim.compare import to_object

    lengths_of.cache_clear()
    names = asked(options)
    if options.out is not None:
        check_folder(options.out)
    swept = check_sweep(options) if options.sweep else []
    study = run_study(options, with_baselines(names), to_stderr)
    everything = to_object(study.tallies, options.ranks)
    result = shown(everything, names)
    title = headline(options, options.profile().name)
    sweeps = [run_sweep(options, names, axis, to_stderr) for axis in swept]
    if options.out is not None:
        from megatron_dcp.cli.simulate.page import write_report

        page = write_report(options, study, result, sweeps, title)
        to_stderr(f"report: {page}")
    if options.json:
        json.dump(result, sys.stdout)
        sys.stdout.write("\n")
    else:
        print(table(result, names, title, options.steps * options.seeds), end="")
        for sweep in sweeps:
            print("\n" + sweep_table(sweep, names), end="")
    return 0 if result["strategies"] else 1
