"""Recomputation per microbatch, through the settings that Megatron reads at each forward.

TransformerBlock looks at `config.recompute_granularity`, `recompute_method` and
`recompute_num_layers` in every forward; selective core attention is an attribute of each attention.
A placement that asks for r layers gets method `block` with r layers; one that asks for none gets
what the user configured, which is thereby the least that is recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_SETTINGS = ("recompute_granularity", "recompute_method", "recompute_num_layers")


@dataclass(slots=True)
class Recompute:
    """The configuration of one model chunk, and the user's own settings to return to."""

    config: Any
    attentions: tuple[Any, ...]
    base: dict[str, Any]
    base_selective: tuple[bool, ...]

    @staticmethod
    def of(model: Any, config: Any) -> Recompute:
        attentions = tuple(m for m in model.modules() if hasattr(m, "checkpoint_core_attention"))
        return Recompute(
            config=config,
            attentions=attentions,
            base={name: getattr(config, name) for name in _SETTINGS},
            base_selective=tuple(bool(a.checkpoint_core_attention) for a in attentions),
        )

    def apply(self, layers: int, kind: str, stage_layers: int) -> None:
        """Set the recomputation of the next forward: `layers` of this stage's `stage_layers`."""
        self.restore()
        if layers == 0:
            return
        if kind == "selective":
            for attention in self.attentions:
                attention.checkpoint_core_attention = True
            return
        if self.base["recompute_granularity"] == "full":
            own = self.base["recompute_num_layers"] or 0
            whole = self.base["recompute_method"] == "uniform"
            layers = stage_layers if whole else max(layers, own)
        self.config.recompute_granularity = "full"
        self.config.recompute_method = "block"
        self.config.recompute_num_layers = min(layers, stage_layers)

    def restore(self) -> None:
        """Back to the user's own settings."""
        for name, value in self.base.items():
            setattr(self.config, name, value)
        for attention, selective in zip(self.attentions, self.base_selective, strict=True):
            attention.checkpoint_core_attention = selective
