"""Configuration records: frozen, keyword-only, slotted dataclasses; unit in the field's name.

The same dataclass makes the command line, the YAML file, the `--mdcp-*` flags and the docs table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Oversize = Literal["error", "drop", "truncate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerConfig:
    """How the plan of each step is made.

    strategy: a name of the registry, parameters after a colon.
    cost: `auto`, a profile preset or a profile file.
    memory_gb: budget per data rank, 1e9 bytes; None takes the profile's.
    lockstep: `auto`, 1, `node`, `all` or ranks per domain.
    recompute: `auto` lets the planner recompute activations, `off` forbids it.
    oversize: what happens to a sample that cannot fit on all ranks with full recompute.
    """

    strategy: str = "dcp"
    cost: str = "auto"
    memory_gb: float | None = None
    lockstep: str = "auto"
    recompute: Literal["auto", "off"] = "auto"
    oversize: Oversize = "error"
