"""From a hardware preset and a model preset to a CostProfile, by roofline arithmetic.

Each coefficient is a count of `models.py` over a rate of `hardware.py`; `docs/cost_model.md` writes
the lines out. What the model leaves out is said there too: clock throttling, kernel fusion beyond
the counted traffic, and network contention (the simulator's own subject).
"""

from __future__ import annotations

import math
from dataclasses import replace

from megatron_dcp.cost.hardware import Hardware, hardware
from megatron_dcp.cost.models import ModelSpec, model
from megatron_dcp.cost.profile import (
    CostProfile,
    Link,
    Overhead,
    Overlap,
    RecomputeFraction,
    budget_bytes,
)
from megatron_dcp.errors import ConfigError
from megatron_dcp.plan import Topology

# Bytes of state per parameter: bf16 (or fp32) weight and fp32 gradient on every rank, fp32 master
# weight and two Adam moments sharded over the data ranks; ZeRO-3 shards all of it.
GRADIENT_BYTES = 4
OPTIMIZER_BYTES = 12
# Elementwise traffic in units of kept activations: each is written and read, and so its gradient.
TRAFFIC = 4
# Temporal sequences (15 to 120 frames) are shorter than a kernel tile of 128 rows.
TEMPORAL_RATE = 0.35
# Half of the attention kernel's time per pair does not shrink with the head dimension
# (exponentials and loads): rate(D) = rate(128) * D / (64 + D / 2).
HEAD_DIM = 128
# Share of the attention time under which a ring hides its transfers; the other schemes hide none.
RING_OVERLAP = 0.8


def attention_flops_per_s(hw: Hardware, spec: ModelSpec) -> float:
    """Rate of the attention kernel at this head dimension, long sequences."""
    d = min(spec.head_dim, HEAD_DIM)
    return hw.peak_flops * hw.efficiency.attention * d / (HEAD_DIM / 2 + d / 2)


def gather_bytes_per_s(hw: Hardware, topology: Topology) -> float:
    """Rate at which each rank receives in a gather over all data ranks.

    Inside a node the fast link; across nodes every port of a node carries a part of the ring.
    """
    node = hw.node_link_bytes_per_s
    if topology.nodes == 1:
        return node * hw.efficiency.link
    return min(node, topology.ranks_per_node * hw.net_link_bytes_per_s) * hw.efficiency.link


def _linear_us(hw: Hardware, spec: ModelSpec) -> float:
    """us per token: products at the matrix rate, elementwise traffic at the memory rate."""
    flops = spec.layers * spec.linear_flops_per_token_layer + spec.head_flops_per_token
    traffic = TRAFFIC * spec.layers * spec.kept_bytes_per_token_layer(hw.element_bytes)
    seconds = flops / (hw.peak_flops * hw.efficiency.gemm)
    seconds += traffic / (hw.memory_bytes_per_s * hw.efficiency.memory)
    return seconds * 1e6


def _weights_us(hw: Hardware, spec: ModelSpec) -> float:
    """us to read all weights three times (forward, two products backward): a microbatch's floor."""
    moved = 3 * spec.parameters * hw.element_bytes
    return moved / (hw.memory_bytes_per_s * hw.efficiency.memory) * 1e6


def _overhead(hw: Hardware, spec: ModelSpec, topology: Topology) -> Overhead:
    """Per microbatch: launches, adding to the fp32 gradients; ZeRO-3 instead gathers the weights
    twice and scatters the gradients once, not hidden (as the constants published with FlexSP)."""
    launches = spec.layers * hw.efficiency.launch_us_per_layer
    memory_rate = hw.memory_bytes_per_s * hw.efficiency.memory
    accumulate = 2 * GRADIENT_BYTES * spec.parameters / memory_rate * 1e6
    n = topology.data_ranks
    moved = 3 * spec.parameters * hw.element_bytes * (n - 1) / n
    gathers = moved / gather_bytes_per_s(hw, topology) * 1e6
    return Overhead(async_=launches + accumulate, lockstep=launches + gathers)


def _links(hw: Hardware, topology: Topology) -> tuple[Link, ...]:
    """One row inside the node, one across (a ring of whole nodes crosses on one port per node)."""
    eff = hw.efficiency.link
    inside = Link(
        max_degree=topology.ranks_per_node,
        us_per_byte=1e6 / (hw.node_link_bytes_per_s * eff),
        latency_us=hw.node_latency_us,
    )
    if topology.nodes == 1:
        return (inside,)
    across = Link(
        max_degree=topology.data_ranks,
        us_per_byte=1e6 / (hw.net_link_bytes_per_s * eff),
        latency_us=hw.net_latency_us,
    )
    return (inside, across)


def static_bytes(hw: Hardware, spec: ModelSpec, topology: Topology, *, sharded: bool) -> int:
    """Weights, gradients and optimizer per rank; `sharded`: ZeRO-3 plus two gathered layers."""
    n, e = topology.data_ranks, hw.element_bytes
    if sharded:
        gathered = 2 * (spec.layer_parameters + spec.vocab * spec.hidden) * e
        return spec.parameters * (e + GRADIENT_BYTES + OPTIMIZER_BYTES) // n + gathered
    return spec.parameters * (e + GRADIENT_BYTES) + spec.parameters * OPTIMIZER_BYTES // n


def profile(
    hardware_name: str | Hardware,
    model_name: str | ModelSpec,
    topology: Topology | None = None,
    *,
    lockstep: int = 1,
    memory_gb: float | None = None,
    net_gbit_per_s: float | None = None,
) -> CostProfile:
    """The analytic profile of a model on a cluster.

    topology: data ranks; default one node of the preset. lockstep: ranks per lockstep domain; all
    data ranks means ZeRO-3, whose state is sharded. memory_gb: memory of one rank instead of the
    datasheet's, 1e9 bytes. net_gbit_per_s: network rate per rank instead of the datasheet's.
    With pipeline stages the state is divided by the stages; time and activation terms are divided
    by the cost model itself. Raises ConfigError for unknown names, impossible rates, or where the
    state alone exceeds the memory.
    """
    hw = hardware(hardware_name) if isinstance(hardware_name, str) else hardware_name
    spec = model(model_name) if isinstance(model_name, str) else model_name
    if memory_gb is not None:
        hw = replace(hw, memory_bytes=budget_bytes(memory_gb))
    if net_gbit_per_s is not None:
        if not 0 < net_gbit_per_s < math.inf:
            raise ConfigError(f"network rate of {net_gbit_per_s} Gbit/s; use a number above 0")
        hw = replace(hw, net_link_bytes_per_s=net_gbit_per_s * 1e9 / 8)
    if topology is None:
        topology = Topology(data_ranks=hw.ranks_per_node, ranks_per_node=hw.ranks_per_node)
    sharded = topology.data_ranks > 1 and lockstep == topology.data_ranks
    fixed = static_bytes(hw, spec, topology, sharded=sharded) // topology.pipeline_stages
    if fixed >= hw.budget_bytes:
        raise ConfigError(
            f"{spec.name} on {hw.name}: weights, gradients and optimizer need {fixed / 1e9:.1f} GB "
            f"per rank, {hw.budget_bytes / 1e9:.1f} GB are usable; shard them with --lockstep all "
            "(ZeRO-3), use more pipeline stages, more ranks or a smaller model"
        )
    e = hw.element_bytes
    per_pair = spec.layers * spec.attention_flops_per_pair_layer / attention_flops_per_s(hw, spec)
    per_pair *= 1e6
    grid = spec.pairs == "grid"
    linear = _linear_us(hw, spec)
    return CostProfile(
        name=f"{hw.name}-{spec.name}",
        model=spec.shape(e),
        pairs=spec.pairs,
        linear_us_per_token=linear,
        attn_us_per_pair=0.0 if grid else per_pair,
        attn_spatial_us_per_pair=per_pair / 2 if grid else 0.0,
        attn_temporal_us_per_pair=per_pair / 2 / TEMPORAL_RATE if grid else 0.0,
        linear_half_tokens=round(_weights_us(hw, spec) / linear),
        attn_half_tokens=hw.efficiency.attention_half_tokens,
        recompute_fraction=RecomputeFraction(linear=1 / 3, attention=4 / 14, comm=0.5),
        overhead_us=_overhead(hw, spec, topology),
        links=_links(hw, topology),
        overlap=Overlap(ring=RING_OVERLAP),
        static_bytes=fixed,
        kept_bytes_per_token_layer=spec.kept_bytes_per_token_layer(e),
        checkpoint_bytes_per_token_layer=spec.checkpoint_bytes_per_token_layer(e),
        working_bytes_per_token=spec.working_bytes_per_token(e),
        head_bytes_per_token=spec.head_bytes_per_token(e),
        budget_bytes=hw.budget_bytes,
        fingerprint={"hardware": hw.name, "model": spec.name, "source": "analytic preset"},
    )


def always_recomputed(p: CostProfile) -> CostProfile:
    """The profile of a run that checkpoints every layer in every microbatch, needed or not.

    Linear, attention and communication take their full recompute fraction more, and a layer keeps
    its checkpoint only; nothing is left for a plan to choose.
    """
    f = p.recompute_fraction
    links = tuple(replace(row, us_per_byte=row.us_per_byte * (1 + f.comm)) for row in p.links)
    return replace(
        p,
        name=f"{p.name}+checkpointed",
        linear_us_per_token=p.linear_us_per_token * (1 + f.linear),
        attn_us_per_pair=p.attn_us_per_pair * (1 + f.attention),
        attn_spatial_us_per_pair=p.attn_spatial_us_per_pair * (1 + f.attention),
        attn_temporal_us_per_pair=p.attn_temporal_us_per_pair * (1 + f.attention),
        links=links,
        recompute_fraction=RecomputeFraction(linear=0.0, attention=0.0, comm=0.0),
        kept_bytes_per_token_layer=p.checkpoint_bytes_per_token_layer,
    )
