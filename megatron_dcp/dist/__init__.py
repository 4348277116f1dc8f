"""Process groups, the wire, plan agreement and the current placement."""

from megatron_dcp.dist.agree import agree, gather_bytes
from megatron_dcp.dist.context import (
    PlacementContext,
    current_or_none,
    current_placement,
    local_context,
    make_context,
    packed,
    set_current,
    use_placement,
)
from megatron_dcp.dist.mesh import data_dims_of, planes_of, stage_group_of
from megatron_dcp.dist.pacing import LinkPacer
from megatron_dcp.dist.samples import sum_by_sample, sum_over_block
from megatron_dcp.dist.post import PlanPost
from megatron_dcp.dist.stores import job_store
from megatron_dcp.dist.wire import Pending, Wire
from megatron_dcp.dist.world import DataWorld

__all__ = [
    "DataWorld",
    "LinkPacer",
    "Pending",
    "PlanPost",
    "PlacementContext",
    "Wire",
    "agree",
    "current_or_none",
    "current_placement",
    "data_dims_of",
    "gather_bytes",
    "job_store",
    "local_context",
    "make_context",
    "packed",
    "planes_of",
    "set_current",
    "sum_by_sample",
    "sum_over_block",
    "stage_group_of",
    "use_placement",
]
