"""What a stand-in is: one piece with its reason, and the setter that remembers the way back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StandIn:
    """One piece: why it is needed and which call sites of Megatron it serves."""

    name: str
    reason: str
    call_sites: str
    install: Callable[[Setter], None]


class Setter:
    """Sets attributes and items and remembers the way back."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def attribute(self, owner: Any, name: str, value: Any) -> None:
        # The owner's own entry: what it inherits must not be left behind in it.
        own = vars(owner)
        before = own.get(name)
        self._undo.append(
            (lambda: setattr(owner, name, before)) if name in own else lambda: delattr(owner, name)
        )
        setattr(owner, name, value)

    def finally_(self, call: Callable[[], None]) -> None:
        self._undo.append(call)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()
