"""Process groups that a plan needs, and the device memory that groups cost."""

from __future__ import annotations

from megatron_dcp.plan.types import StepPlan

# NCCL keeps buffers per channel and connected neighbour for its three protocols; the defaults are
# NCCL_BUFFSIZE 4 MiB, LL128 120 * 640 * 8 steps * 8 bytes, LL 8 * 512 * 8 steps * 16 bytes.
_PER_CHANNEL_BYTES = 4 * 2**20 + 120 * 640 * 8 * 8 + 8 * 512 * 8 * 16
NCCL_CHANNELS = 16


def nccl_bytes(groups: int) -> int:
    """Estimated buffers of one rank in so many groups, from NCCL's defaults; not measured."""
    return groups * NCCL_CHANNELS * _PER_CHANNEL_BYTES


def communicators(plan: StepPlan) -> set[tuple[int, ...]]:
    """Process groups that a plan needs besides the world: (first, size) of each shared block, and
    (first, size, stride) of the inner and outer groups of hybrid blocks. Size 1 needs none."""
    out: set[tuple[int, ...]] = set()
    for p in plan.placements:
        if p.degree == 1:
            continue
        u = p.inner_degree
        if p.scheme != "hybrid":
            out.add((p.first_rank, p.degree))
            continue
        out.update((p.first_rank + k, u) for k in range(0, p.degree, u))
        out.update((p.first_rank + k, p.degree // u, u) for k in range(u))
    return out
