"""The physical terms of every placement of a plan, from the cost profile and not from the planner.

Written a second time, as numpy arrays over placements, from the formulas of docs/cost_model.md:
`Placement.time_us` is never read here, so that a plan whose times are wrong is found by replay. The
wire bytes alone come from the cost model's function, which the runtime's counters check as well.

All arrays are float64, one entry per placement, in us per pipeline stage unless named otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_dcp.cost import CostProfile, Mode, workload_packs
from megatron_dcp.cost.model import layers_per_stage, messages, wire_bytes
from megatron_dcp.plan import StepPlan
from megatron_dcp.plan.types import NOMINAL_SPEED, Placement

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Where the time of each placement goes on each rank of its block.

    linear, attention: without recomputation. recompute: extra time of recomputed layers, compute
    and communication. wire_inside, wire_across: transfer time at full rate inside a node and across
    nodes, latency included. hidden: transfer time that attention covers. overhead: per microbatch.
    gathers: what lockstep over a domain adds to the overhead (ZeRO-3: weight gathers).
    forward: share of (time - overhead) that the forward pass takes. pace: nominal over the speed of
    the block's slowest rank. dummy: a microbatch of one token on the slowest rank.
    """

    linear: Array
    attention: Array
    recompute: Array
    wire_inside: Array
    wire_across: Array
    hidden: Array
    overhead: Array
    gathers: Array
    forward: Array
    pace: Array
    dummy: float

    @property
    def compute(self) -> Array:
        """Everything on the rank itself, at the block's pace."""
        own: Array = self.linear + self.attention + self.recompute + self.overhead + self.gathers
        return own * self.pace

    def exposed(self, share: float | Array = 1.0) -> Array:
        """Communication that compute does not cover when links give `share` of their rate."""
        wire = (self.wire_inside + self.wire_across) / share
        exposed: Array = np.maximum(wire - self.hidden, 0.0) * self.pace
        return exposed

    def total(self) -> Array:
        """Time of each placement without contention and noise, whole us (half up)."""
        total: Array = np.floor(self.compute + self.exposed() + 0.5)
        return total


def _fused_followers(placements: tuple[Placement, ...]) -> set[int]:
    """Placements inside a wider fused one of their slot: they run in its forward, without another
    overhead."""
    out: set[int] = set()
    heads: list[Placement] = []
    for i, p in enumerate(placements):
        if not p.fused:
            continue
        if heads and heads[0].slot != p.slot:
            heads = []
        if any(h.first_rank <= p.first_rank and p.ranks.stop <= h.ranks.stop for h in heads):
            out.add(i)
        else:
            heads.append(p)
    return out


def _sums(plan: StepPlan, profile: CostProfile) -> NDArray[np.float64]:
    """[placements, 5]: tokens, pairs, sum 2A/L, second pairs, second sum 2A/L."""
    packs = workload_packs(profile, plan.workload)
    table = np.array(
        [[k.tokens, k.pairs, k.half, k.pairs2, k.half2] for k in packs], dtype=np.float64
    )
    samples = np.concatenate([np.asarray(p.samples, dtype=np.int64) for p in plan.placements])
    counts = np.array([len(p.samples) for p in plan.placements])
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    summed: NDArray[np.float64] = np.add.reduceat(table[samples], starts, axis=0)
    return summed


def _wires(
    plan: StepPlan, profile: CostProfile, tokens: Array
) -> tuple[Array, Array, Array, Array]:
    """(inside bytes time, across bytes time, inside latency, across latency), no recompute."""
    layers, node = layers_per_stage(profile, plan.topology), plan.topology.ranks_per_node
    out = np.zeros((4, len(plan.placements)))
    for i, p in enumerate(plan.placements):
        if p.degree == 1:
            continue
        mode = Mode(p.scheme, p.inner_degree)
        inner_bytes, outer_bytes = wire_bytes(profile, mode, int(tokens[i]), p.degree)
        inner_count, outer_count = messages(mode, p.degree)
        for row_degree, sent, count in (
            (p.inner_degree, inner_bytes, inner_count),
            (p.degree, outer_bytes, outer_count),
        ):
            if not sent and not count:
                continue
            link = profile.link(row_degree)
            across = int(row_degree > node)
            out[across, i] += sent * layers * link.us_per_byte
            out[2 + across, i] += count * layers * link.latency_us
    return out[0], out[1], out[2], out[3]


def terms(plan: StepPlan, profile: CostProfile) -> Terms:
    """Price every placement of a plan. Raises ConfigError where the profile does not suit it."""
    if not plan.placements:
        zero = np.zeros(0)
        arrays = [f for f in Terms.__dataclass_fields__ if f != "dummy"]
        return Terms(**dict.fromkeys(arrays, zero), dummy=0.0)
    topology, stages = plan.topology, plan.topology.pipeline_stages
    layers = layers_per_stage(profile, topology)
    sums = _sums(plan, profile)
    degree = np.array([p.degree for p in plan.placements], dtype=np.float64)
    share = np.array([p.recompute for p in plan.placements], dtype=np.float64) / layers
    tokens = sums[:, 0]
    linear = profile.linear_us_per_token * (tokens / degree + profile.linear_half_tokens) / stages
    half = profile.attn_half_tokens * degree / 2
    if profile.pairs == "grid":
        attention = profile.attn_spatial_us_per_pair * (sums[:, 1] + half * sums[:, 2])
        attention += profile.attn_temporal_us_per_pair * (sums[:, 3] + half * sums[:, 4])
    else:
        attention = profile.attn_us_per_pair * (sums[:, 1] + half * sums[:, 2])
    attention = attention / degree / stages
    inside, across, lat_inside, lat_across = _wires(plan, profile, tokens)
    f = profile.recompute_fraction
    again = 1.0 + f.comm * share
    overlap = _overlaps(plan, profile)
    overhead, gathers = _overheads(plan, profile)
    extra = (f.linear * linear + f.attention * attention) * share
    wire_inside, wire_across = inside * again + lat_inside, across * again + lat_across
    hidden = overlap * attention * (1.0 + f.attention * share)
    exposed = np.maximum(wire_inside + wire_across - hidden, 0.0)
    body = linear + attention + extra + exposed
    ahead = f.linear * linear + f.attention * attention + 0.5 * exposed
    return Terms(
        linear=linear,
        attention=attention,
        recompute=extra,
        wire_inside=wire_inside,
        wire_across=wire_across,
        hidden=hidden,
        overhead=overhead,
        gathers=gathers,
        forward=np.divide(ahead, body, out=np.full_like(body, 1 / 3), where=body > 0),
        pace=np.array(
            [NOMINAL_SPEED / topology.block_speed(p.first_rank, p.degree) for p in plan.placements]
        ),
        dummy=_dummy_us(plan, profile),
    )


def _dummy_us(plan: StepPlan, profile: CostProfile) -> float:
    """Its attention is one pair: nothing."""
    o, topology = profile.overhead_us, plan.topology
    token = profile.linear_us_per_token * (1 + profile.linear_half_tokens)
    own = token / topology.pipeline_stages + (o.async_ if plan.lockstep == 1 else o.lockstep)
    return own * NOMINAL_SPEED / topology.block_speed(0, topology.data_ranks)


def _overlaps(plan: StepPlan, profile: CostProfile) -> Array:
    o = profile.overlap
    by_scheme = {
        "local": 0.0, "ulysses": o.ulysses, "allgather": o.allgather, "ring": o.ring,
        "hybrid": o.ring,
    }  # fmt: skip
    return np.array([by_scheme[p.scheme] for p in plan.placements])


def _overheads(plan: StepPlan, profile: CostProfile) -> tuple[Array, Array]:
    """(overhead, gathers). A lockstep overhead below the async one is all overhead."""
    o = profile.overhead_us
    count = len(plan.placements)
    if plan.lockstep == 1:
        overhead, gathers = np.full(count, o.async_), np.zeros(count)
    else:
        base = min(o.async_, o.lockstep)
        overhead, gathers = np.full(count, base), np.full(count, o.lockstep - base)
    for i in _fused_followers(plan.placements):
        overhead[i] = gathers[i] = 0.0
    return overhead, gathers
