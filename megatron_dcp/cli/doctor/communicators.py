"""How many communicators a job makes at most, and what they cost in device memory.

Counted from the rule in `dist/world.py`: one group of all data ranks, and all-to-all groups of the
aligned blocks inside a node that plans use, made when a plan first needs them. Groups of the
trainer itself (tensor, pipeline, expert parallel) come on top and are not counted.
"""

from __future__ import annotations

from typing import Any

from megatron_dcp.errors import ConfigError
from megatron_dcp.plan.groups import NCCL_CHANNELS, nccl_bytes


def block_sizes(ranks_per_node: int) -> list[int]:
    """Sizes of the all-to-all groups: powers of two inside a node, and the node itself."""
    if ranks_per_node < 2:
        return []
    sizes = [2**k for k in range(1, ranks_per_node.bit_length()) if 2**k < ranks_per_node]
    return [*sizes, ranks_per_node]


def estimate(ranks: int, ranks_per_node: int) -> dict[str, Any]:
    """Upper bounds for a job: groups in the job, groups that one rank is in, bytes per rank.

    Raises ConfigError when the ranks do not fill whole nodes.
    """
    if ranks < 1 or ranks_per_node < 1:
        raise ConfigError(f"--ranks {ranks}, --ranks-per-node {ranks_per_node}: both must be >= 1")
    node = min(ranks, ranks_per_node)
    if ranks % node:
        raise ConfigError(
            f"--ranks {ranks} is not a multiple of --ranks-per-node {node}; a job fills its nodes"
        )
    sizes = block_sizes(node)
    whole = 1 if ranks > 1 else 0
    # On one node the block of the whole node has a group beside the one of all data ranks.
    in_job = whole + sum(ranks // node * (node // size) for size in sizes)
    in_rank = whole + len(sizes)
    nbytes = nccl_bytes(in_rank)
    return {
        "ranks": ranks,
        "ranks_per_node": node,
        "block_sizes": sizes,
        "in_job_at_most": in_job,
        "per_rank_at_most": in_rank,
        "nccl_bytes_per_rank_estimate": nbytes,
        "text": [
            f"{ranks} ranks, {node} per node: at most {in_job} in the job, {in_rank} per rank "
            f"(one of all data ranks; all-to-all blocks of {sizes or 'no size'}, made when used)",
            f"about {nbytes / 2**20:.0f} MiB per rank with NCCL if all are used: an estimate from "
            f"its default buffer sizes and {NCCL_CHANNELS} channels, not measured; gloo keeps none",
        ],
    }
