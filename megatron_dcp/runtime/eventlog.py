"""What a rank measured in a step, as events of `megatron_dcp.observe.events`.

Times are `time.monotonic_ns` in us. The wire's listener turns every blocking interval of
communication into an event: `reduce` for gradients, `comm` for the rest, with the slot and block of
the placement that is running. On a GPU the clock is read after a synchronisation, only while
measuring.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from megatron_dcp.dist import DataWorld, current_or_none
from megatron_dcp.plan import Placement
from megatron_dcp.runtime.memory import peak_held, reset_peak


def now_us() -> int:
    return time.monotonic_ns() // 1000


class EventLog:
    """Events of one rank; `take` hands them over and forgets them."""

    def __init__(self, world: DataWorld, *, measure: bool) -> None:
        self.world, self.measure = world, measure
        self.events: list[dict[str, Any]] = []
        self.step = 0
        self._counting = False
        if measure:
            world.wire.listener = self._heard

    def clock(self) -> int:
        """Now, with the device's queue drained while measuring."""
        if self.measure and self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
        return now_us()

    def add(self, kind: str, start_us: int, end_us: int, **more: Any) -> None:
        if self.measure:
            event = {"rank": self.world.rank, "step": self.step, "kind": kind}
            self.events.append({**event, "start_us": start_us, "end_us": end_us, **more})

    def begin_step(self) -> int:
        """The step's start, us; while measuring, memory is counted from here."""
        self._counting = self.measure and reset_peak(self.world.device)
        return self.clock()

    def end_step(self, start_us: int, **more: Any) -> None:
        """The event of the whole step, with the most bytes that this rank held in it."""
        if self._counting:
            more["bytes"] = peak_held(self.world.device)
        self.add("step", start_us, self.clock(), **more)

    def add_placement(
        self, kind: str, start_us: int, end_us: int, p: Placement, **more: Any
    ) -> None:
        """An event of a placement: with its slot, block and scheme."""
        where = {"slot": p.slot, "first_rank": p.first_rank, "degree": p.degree}
        self.add(kind, start_us, end_us, **where, scheme=p.scheme, **more)

    def _heard(self, kind: str, start_ns: int, end_ns: int) -> None:
        start, end = start_ns // 1000, end_ns // 1000
        if kind == "reduce":
            self.add("reduce", start, end)
        elif kind != "agree":
            context = current_or_none()
            if context is None:
                self.add("comm", start, end)
            else:
                self.add_placement("comm", start, end, context.placement)

    def take(self) -> list[dict[str, Any]]:
        out, self.events = self.events, []
        return out
