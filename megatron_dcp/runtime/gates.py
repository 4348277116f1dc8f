"""Gates: places in a step where ranks wait for each other in the job's store, or learn to give up.

A rank arrives at a gate saying whether it goes on; the last one to arrive opens it. It opens as
passable only if all said so, and then for everybody alike: so either all ranks of a block go into
its collectives, or none does. A rank that gives up a step arrives at all its remaining gates at
once without waiting, so that nobody waits for it.

The store is on the hosts' side: waiting here touches neither the device's queue nor any group.
"""

from __future__ import annotations

from typing import Any

from megatron_dcp.dist import DataWorld, job_store

_REFUSAL = 1 << 32  # added for every rank that does not go on; the low half counts arrivals


class Gates:
    """Gates of one engine. Collective when made."""

    def __init__(self, world: DataWorld) -> None:
        self._store: Any = None
        self._owned: list[str] = []  # opened here, to be removed when nobody can still read them
        if world.everyone is not None:
            self._store = job_store(world, "gates")

    def arrive(self, name: str, size: int, *, goes_on: bool) -> None:
        """Say whether this rank goes on; does not wait. size: how many ranks meet here."""
        if self._store is None:
            return
        count = self._store.add(f"{name}/count", 1 if goes_on else 1 + _REFUSAL)
        if count % _REFUSAL == size:
            self._store.set(f"{name}/open", "1" if count < _REFUSAL else "0")
            self._owned.append(name)

    def wait(self, name: str) -> bool:
        """Wait until all have arrived; whether all go on."""
        return self._store is None or bool(self._store.get(f"{name}/open") == b"1")

    def forget(self, but: str) -> None:
        """Remove the gates opened here but one. Call it when all ranks are past the others."""
        for name in self._owned:
            if name != but:
                self._store.delete_key(f"{name}/count")
                self._store.delete_key(f"{name}/open")
        self._owned = [n for n in self._owned if n == but]
