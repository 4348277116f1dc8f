"""PatchSet: changes to attributes of a trainer's modules, checked first and undone last.

Every Patch names its target, why it exists and the parameters that it relies on. `check` compares
them with what is installed and never touches anything; `apply` checks all patches before it changes
the first attribute, so that a mismatch leaves the trainer as it was; `undo` puts every original
back, in reverse order. This module imports no trainer by itself: targets are found by name.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from megatron_dcp.errors import AdapterError


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One attribute to replace.

    target: `package.module:Class.attribute`. parameters: names that the original's signature must
    have. make: called with the original, returns the replacement. optional: the target may be
    missing (a module that this version does not have); a wrong signature is never excused.
    """

    name: str
    target: str
    reason: str
    make: Callable[[Any], Any]
    parameters: tuple[str, ...] = ()
    optional: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchStatus:
    """What `check` found for one patch; `fault` is None where it can be applied."""

    name: str
    target: str
    reason: str
    fault: str | None
    present: bool
    applied: bool = False

    def line(self) -> str:
        """One line for people: used by `mdcp doctor` and the log."""
        if self.applied:
            state = "applied"
        elif self.fault:
            state = f"unusable: {self.fault}"
        else:
            state = "usable" if self.present else "not needed in this version"
        return f"{self.name} ({self.target}): {state}; {self.reason}"


def locate(target: str) -> tuple[Any, str, Any]:
    """(owner, attribute name, present value) of `package.module:a.b`; raises LookupError."""
    module_name, _, path = target.partition(":")
    try:
        owner: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise LookupError(f"module {module_name} cannot be imported: {error}") from error
    *parents, attribute = path.split(".")
    for parent in parents:
        if not hasattr(owner, parent):
            raise LookupError(f"{module_name} has no {parent!r}")
        owner = getattr(owner, parent)
    # The raw value of a class attribute, so that static and class methods survive an undo.
    value = owner.__dict__.get(attribute) if isinstance(owner, type) else None
    if value is None and not hasattr(owner, attribute):
        raise LookupError(f"{target.rpartition('.')[0] or module_name} has no {attribute!r}")
    return owner, attribute, getattr(owner, attribute) if value is None else value


def signature_fault(value: Any, parameters: tuple[str, ...]) -> str | None:
    """What is missing of the parameters that a patch relies on, or None."""
    if not parameters:
        return None
    try:
        found = list(inspect.signature(value).parameters)
    except (TypeError, ValueError) as error:
        return f"no signature can be read ({error}), looked for parameters {list(parameters)}"
    missing = [p for p in parameters if p not in found]
    if missing:
        return f"looked for parameters {list(parameters)}, found {found}: {missing} missing"
    return None


@dataclass(slots=True)
class PatchSet:
    """Patches of one trainer, applied and undone together."""

    trainer: str
    patches: list[Patch] = field(default_factory=list)
    _undo: list[tuple[Any, str, Any, Patch]] = field(default_factory=list)

    @property
    def applied(self) -> tuple[str, ...]:
        return tuple(patch.name for *_, patch in self._undo)

    def check(self) -> list[PatchStatus]:
        """The state of every patch; changes nothing."""
        return [self._status(patch) for patch in self.patches]

    def _status(self, patch: Patch) -> PatchStatus:
        fault, present = None, True
        if patch.name not in self.applied:
            try:
                fault = signature_fault(locate(patch.target)[2], patch.parameters)
            except LookupError as error:
                present = False
                fault = None if patch.optional else f"looked for {patch.target}: {error}"
        return PatchStatus(
            name=patch.name,
            target=patch.target,
            reason=patch.reason,
            fault=fault,
            present=present,
            applied=patch.name in self.applied,
        )

    def apply(self) -> PatchSet:
        """Check all, then replace all. Raises AdapterError and leaves everything as it was."""
        faults = [s for s in self.check() if s.fault]
        if faults:
            lines = "; ".join(f"{s.name}: {s.fault}" for s in faults)
            raise AdapterError(
                f"{self.trainer} does not have what {len(faults)} of {len(self.patches)} patches "
                f"look for: {lines}. Use a tested version (docs/integrations/megatron.md)"
            )
        for status, patch in zip(self.check(), self.patches, strict=True):
            if status.applied or not status.present:
                continue
            owner, attribute, original = locate(patch.target)
            setattr(owner, attribute, patch.make(original))
            self._undo.append((owner, attribute, original, patch))
        return self

    def undo(self) -> None:
        """Put every original back."""
        while self._undo:
            owner, attribute, original, _ = self._undo.pop()
            setattr(owner, attribute, original)

    @contextmanager
    def active(self) -> Iterator[PatchSet]:
        """Applied inside the block, undone after it."""
        self.apply()
        try:
            yield self
        finally:
            self.undo()
