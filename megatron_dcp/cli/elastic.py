"""torchrun that knows two endings more: `python -m megatron_dcp.cli.elastic`.

Takes torchrun's arguments.

* A preempted run: torchrun itself exits with 1 whatever status a rank left with, so that a batch
  script could not tell a run that wrote its checkpoint and wants to be requeued (STOP_STATUS) from
  one that failed. Here that status is passed on.
* A run that was out of memory: it left a smaller budget in the file that MDCP_OOM_FILE names. It is
  started again, up to MDCP_OOM_RESTARTS times (default 3), with MDCP_RESTARTED=1; `mdcp train` then
  resumes from its newest checkpoint as if it had been given --resume, and `mdcp.initialize` plans
  with that budget. A script of your own should load its newest checkpoint when it starts.

Every other outcome is torchrun's own.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from megatron_dcp.runtime.oom import OOM_FILE, RESTARTED, read_budget
from megatron_dcp.runtime.preempt import STOP_STATUS

RESTARTS = "MDCP_OOM_RESTARTS"


def main(argv: list[str]) -> int:
    """STOP_STATUS when this is what the first rank to leave did; else raises as torchrun does."""
    with tempfile.TemporaryDirectory(prefix="mdcp-") as folder:
        os.environ.setdefault(OOM_FILE, str(Path(folder) / "out_of_memory.json"))
        return _run(argv)


def _run(argv: list[str]) -> int:
    for left in range(int(os.environ.get(RESTARTS, "3")), -1, -1):
        before = read_budget()
        try:
            torchrun(argv)
            return 0
        except ChildFailedError as error:
            _, first = error.get_first_failure()
            if first.exitcode == STOP_STATUS:
                return STOP_STATUS
            budget = read_budget()
            if budget is None or budget == before or not left:
                raise
            print(
                f"mdcp: out of memory; started again with a budget of {budget} bytes per rank "
                f"({left - 1} more such restarts)",
                file=sys.stderr,
                flush=True,
            )
            os.environ[RESTARTED] = "1"
            argv = _next_round(argv, left)
    raise AssertionError("the last round returns or raises")


def _next_round(argv: list[str], number: int) -> list[str]:
    """Another rendezvous id: the one of the round before is closed."""
    out = list(argv)
    for i, word in enumerate(out):
        name, _, value = word.partition("=")
        if name.replace("_", "-") != "--rdzv-id":
            continue
        if value:
            out[i] = f"{name}={value}.{number}"
        elif i + 1 < len(out):
            out[i + 1] = f"{out[i + 1]}.{number}"
        break
    return out


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
