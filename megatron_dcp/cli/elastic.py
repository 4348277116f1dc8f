"""torchrun that passes on the status of a preempted run: `python -m megatron_dcp.cli.elastic`.

Takes torchrun's arguments. torchrun itself exits with 1 whatever status a rank left with, so that a
batch script could not tell a run that wrote its checkpoint and wants to be requeued (STOP_STATUS)
from one that failed. Every other outcome is torchrun's own.
"""

from __future__ import annotations

import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from megatron_dcp.runtime.preempt import STOP_STATUS


def main(argv: list[str]) -> int:
    """STOP_STATUS when this is what the first rank to leave did; else raises as torchrun does."""
    try:
        torchrun(argv)
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        if first.exitcode != STOP_STATUS:
            raise
        return STOP_STATUS
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
