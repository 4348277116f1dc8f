"""`mdcp bench end-to-end`: the same samples under every strategy, measured in one run.

Called without a launcher it starts its own ranks (torchrun on this machine) and prints what rank 0
wrote: one run directory per comparison and `bench.json` in --out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from megatron_dcp.cli.outputs import check_folder, write_whole
from megatron_dcp.errors import ConfigError

if TYPE_CHECKING:
    from megatron_dcp.cli.bench_end_to_end.options import EndToEndOptions

FILE = "bench.json"


def main(argv: list[str]) -> int:
    import tyro

    from megatron_dcp.cli.bench_end_to_end.options import EndToEndOptions
    from megatron_dcp.cli.bench_end_to_end.static_settings import check_strategy

    options = tyro.cli(EndToEndOptions, args=argv, prog="mdcp bench end-to-end").sized()
    for strategy in options.strategy_names:
        check_strategy(strategy)
    check_folder(options.out)
    if options.device == "cuda":
        _check_gpus(options.ranks)
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched == 1 and options.ranks > 1:
        status = _launch(argv, options.ranks)
        return status or _show(options)
    if launched not in (1, options.ranks):
        raise ConfigError(f"--ranks {options.ranks} under a launcher of {launched} ranks")
    _run(options)
    return _show(options) if os.environ.get("RANK", "0") == "0" else 0


def _check_gpus(ranks: int) -> None:
    """Raises ConfigError unless each rank of this machine has a GPU."""
    import torch

    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < here:
        raise ConfigError(
            f"--device cuda: {here} ranks on this machine, torch finds {found} CUDA devices; "
            "use --device cpu or fewer --ranks"
        )


def _launch(argv: list[str], ranks: int) -> int:
    """Start the ranks of this machine; their exit status. What rank 0 prints is printed here."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes", "1",
        "--nproc-per-node", str(ranks), "-m", "megatron_dcp", "bench", "end-to-end",
        *(a for a in argv if a not in ("--json", "--bars")),
    ]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=env, stdout=subprocess.DEVNULL, check=False).returncode


def _run(options: EndToEndOptions) -> None:
    """The suite on this rank; rank 0 writes `bench.json`."""
    from megatron_dcp.cli.bench_end_to_end.goals import rows
    from megatron_dcp.cli.bench_end_to_end.suite import run_suite
    from megatron_dcp.cli.train.process import data_ranks

    with data_ranks(options.device):
        runs = run_suite(options)
    if os.environ.get("RANK", "0") == "0":
        options.out.mkdir(parents=True, exist_ok=True)  # there is none where no run was asked for
        result = {
            "schema": "mdcp.bench/1",
            "rows": [asdict(r) for r in rows(runs)],
            "runs": [r.folder for r in runs],
        }
        write_whole(options.out / FILE, (json.dumps(result, indent=1) + "\n").encode())


def _show(options: EndToEndOptions) -> int:
    """Print what the run left; 1 where --bars asks and one is missed."""
    from megatron_dcp.cli.bench_end_to_end.goals import BASELINES
    from megatron_dcp.cli.bench_rows import Row, text_row
    from megatron_dcp.observe.summary import load_summary, table_lines

    result = json.loads((options.out / FILE).read_text())
    found = [Row(**r) for r in result["rows"]]
    missed = [r for r in found if r.ok is False]
    if options.json:
        print(json.dumps({k: result[k] for k in ("schema", "rows")}))
    else:
        for folder in result["runs"]:
            summary = load_summary(options.out / folder)
            print(f"\n{summary['what']}  ({options.out / folder}/summary.json)")
            print("\n".join(table_lines(summary, BASELINES)))
        print()
        for row in (r for r in found if r.bar is not None):
            print(text_row(row))
        print(f"{sum(1 for r in found if r.ok)} bars held, {len(missed)} missed")
    return 1 if options.bars and missed else 0
