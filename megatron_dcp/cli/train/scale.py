"""The scale model of a cluster: which link rate makes this small model feel like a 7B one.

On one machine communication over loopback is nearly free against the compute. What decides whether
sharing a sample pays is communication : compute per token, so the link is paced until that ratio,
for a degree-2 placement of this model on these cores, equals a 7B model's.
"""

from __future__ import annotations

from megatron_dcp.cost import CostProfile, Mode
from megatron_dcp.cost.model import wire_bytes
from megatron_dcp.errors import ConfigError

_TOKENS = 4096  # any number: both sides are per token


def paced_us_per_byte(profile: CostProfile, ratio: float) -> float:
    """us per sent byte at which communication = ratio * linear compute, at degree 2."""
    inner, outer = wire_bytes(profile, Mode("ulysses", 2), _TOKENS, 2)
    sent = (inner + outer) * profile.model.layers
    if not profile.linear_us_per_token > 0:
        raise ConfigError(
            "calibration found no time per token, so no link can be scaled to it: the machine is "
            "too busy or the packs are too short; raise --max-length"
        )
    compute_us = profile.linear_us_per_token * _TOKENS / 2
    return ratio * compute_us / sent
