"""Options of the Hugging Face integrations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from megatron_dcp.cost import CostProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerOptions:
    """Options of the trainer mixin, and what the Accelerate helper passes on to `mdcp.initialize`;
    the latter refuses `max_length`, `fused_loss` and `allow_dropout`, which are given elsewhere.

    cost: profile, preset name or profile file. memory: `auto` or GB per rank. max_length: longer
    samples are cut. fused_loss: token losses without whole logits. allow_dropout: accept dropout
    whose masks depend on the plan. plan_fn: makes the plan of a request instead of `strategy`.
    measure: record events (see `engine.events`).
    """

    cost: str | CostProfile = "auto"
    memory: str | float = "auto"
    strategy: str = "dcp"
    lockstep: str | int = "auto"
    normalize: Literal["token", "sample"] = "token"
    recompute: Literal["auto", "off"] = "auto"
    oversize: Literal["error", "drop", "truncate"] = "error"
    max_length: int | None = None
    fused_loss: bool = True
    allow_dropout: bool = False
    measure: bool = False
    plan_ahead: int = 1
    timeout_s: float | None = None
    ranks_per_node: int | None = None
    plan_fn: Any = None

    def engine_arguments(self) -> dict[str, Any]:
        """Keyword arguments of `mdcp.initialize`."""
        own = ("max_length", "fused_loss", "allow_dropout")
        return {name: getattr(self, name) for name in self.__slots__ if name not in own}
