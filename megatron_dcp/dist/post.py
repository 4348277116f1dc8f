"""Plans from the first plane to the others: made once, taken over byte for byte.

With TP or PP every data rank has peers in other planes that run the same plan. Data rank r of the
first plane makes it and leaves it in the job's store; its peers take it from there. That happens in
the background threads that prepare steps, where a collective could meet those of the main thread.
Which plan each rank took is compared with all others before the step, as ever.
"""

from __future__ import annotations

import threading

from megatron_dcp.dist.stores import job_store
from megatron_dcp.dist.world import DataWorld
from megatron_dcp.errors import PlanError

_TROUBLE = b"!"
_POLL_S = 0.002


class PlanPost:
    """One per engine that has several planes. Collective over all processes when made."""

    def __init__(self, world: DataWorld) -> None:
        self._store = job_store(world, "plans")
        self._rank = world.rank
        self.sends = world.global_ranks == world.planes[0]
        self._stop = threading.Event()

    def _key(self, name: str) -> str:
        return f"{self._rank}/{name}"

    def send(self, name: str, payload: bytes) -> None:
        self._store.set(self._key(name), payload)

    def send_trouble(self, name: str, text: str) -> None:
        """Tell the peers that there is no plan, and why."""
        self.send(name, _TROUBLE + text.encode())

    def take(self, name: str) -> bytes:
        """Wait for the first plane's bytes; PlanError where it had none to give."""
        key = self._key(name)
        while not self._store.check([key]):
            if self._stop.wait(_POLL_S):
                raise PlanError("the run ends; no plan is waited for any more")
        payload: bytes = self._store.get(key)
        if payload.startswith(_TROUBLE):
            raise PlanError(payload[len(_TROUBLE) :].decode())
        return payload

    def taken(self, name: str) -> None:
        """All processes agreed on the step: its plan need not be kept."""
        if self.sends:
            self._store.delete_key(self._key(name))

    def interrupt(self, stop: bool) -> None:
        """Let `take` give up (a loader is left), or wait again."""
        if stop:
            self._stop.set()
        else:
            self._stop.clear()
