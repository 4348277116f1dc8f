"""The group cache over steps that need different blocks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_dcp.dist import DataWorld


def group_budget_case(*, budget: int, steps: list[list[list[int]]]) -> list[dict[str, Any]]:
    """Per step: groups made, groups of this rank, and the sum of ones over each of its blocks."""
    world = DataWorld(group_budget=budget, timeout_s=90)
    found = []
    for step in steps:
        blocks = [(first, size) for first, size in step]
        made = world.ensure_groups(blocks)
        sums = []
        for first, size in blocks:
            if first <= world.rank < first + size:
                ones = torch.ones(1)
                dist.all_reduce(ones, group=world.block_group(first, size))
                sums.append([size, int(ones)])
        found.append({"made": made, "communicators": world.communicators, "sums": sums})
    world.close()
    return found
