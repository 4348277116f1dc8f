"""Preemption: SIGTERM or SIGUSR1 asks for a checkpoint at the end of the step, on all ranks alike.

The signal may reach one rank only, or each at another time. The handler sets a flag; the flag is
summed over ranks together with the loss of the step, so that after a step either all ranks see
`engine.stop_requested` or none does.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from types import FrameType
from typing import Any

STOP_STATUS = 85  # of a run that was preempted, wrote its checkpoint and left


class StopFlag:
    """Installs the handlers; `close` puts the old ones back. Main thread only."""

    def __init__(self, signals: Iterable[int] = (signal.SIGTERM, signal.SIGUSR1)) -> None:
        self.raised = False
        self._before: dict[int, Any] = {s: signal.signal(s, self._handle) for s in signals}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.raised = True

    def close(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
