"""Time and memory models of a placement: profile, formulas, presets. No torch."""

from megatron_dcp.cost.model import CostModel, Mode, Pack, pack_of, sample_pack, workload_packs
from megatron_dcp.cost.presets import PROFILE_NAMES, resolve
from megatron_dcp.cost.profile import (
    CostProfile,
    Link,
    ModelShape,
    budget_bytes,
    digest,
    dumps,
    from_object,
    load,
)

__all__ = [
    "PROFILE_NAMES",
    "CostModel",
    "CostProfile",
    "Link",
    "Mode",
    "ModelShape",
    "Pack",
    "budget_bytes",
    "digest",
    "dumps",
    "from_object",
    "load",
    "pack_of",
    "resolve",
    "sample_pack",
    "workload_packs",
]
