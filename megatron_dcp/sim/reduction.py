"""The end of the step: reducing gradients over the data ranks, and what of it shows.

Reduce-scatter of the gradients and all-gather of the updated weights, ring or tree with the same
traffic: each rank sends (N-1)/N of both. Inside a node the fast link; across nodes a node's ports
work together, so the rate is min(node link, ranks per node * network link). ZeRO-3 (lockstep over
all ranks) reduces in every microbatch; that is part of its per-microbatch gathers, and nothing is
left for the end.
"""

from __future__ import annotations

from megatron_dcp.cost import CostProfile
from megatron_dcp.plan import StepPlan, Topology


def shape_parameters(profile: CostProfile) -> int:
    """Weights of a dense transformer of the profile's shape (MLP of 8 hidden^2)."""
    m = profile.model
    attention = m.hidden * m.head_dim * (2 * m.heads + 2 * m.kv_heads)
    return m.layers * (attention + 8 * m.hidden * m.hidden) + m.vocab * m.hidden


def collective_us_per_byte(profile: CostProfile, topology: Topology) -> float:
    """us per byte that each rank sends in a collective over all data ranks."""
    node = profile.link(topology.ranks_per_node).us_per_byte
    if topology.nodes == 1:
        return node
    network = profile.link(topology.data_ranks).us_per_byte
    return max(node, network / topology.ranks_per_node)


def reduction_us(
    plan: StepPlan, profile: CostProfile, parameters: int | None, gradient_bytes: int
) -> float:
    """Full time of the reduction and the weight gather of one step."""
    t = plan.topology
    n = t.data_ranks
    if n == 1 or plan.lockstep == n:
        return 0.0
    weights = parameters if parameters is not None else shape_parameters(profile)
    sent = weights / t.pipeline_stages * (gradient_bytes + profile.model.element_bytes)
    rate = collective_us_per_byte(profile, t)
    latency = 2 * profile.link(n).latency_us * max(1, (n - 1).bit_length())
    return sent * (n - 1) / n * rate + latency


def exposed_us(
    full: float, makespan: float, last_backward: float, layers: int, *, overlap: bool
) -> float:
    """What the reduction adds after the makespan.

    last_backward: when the last rank begins the backward of its last microbatch; a layer's
    gradients are ready on all ranks only after that. With overlap the layers follow each other, and
    the last layer's share always shows.
    """
    if not overlap:
        return full
    return max(full / max(layers, 1), full - (makespan - last_backward))
