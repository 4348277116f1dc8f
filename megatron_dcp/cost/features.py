"""The time model as a linear one: which numbers of a placement each coefficient multiplies.

For a placement of T tokens and A pairs on d ranks with share s = r / L recomputed,

    time = linear * T/d * (1 + f_lin s) + attn * A/d * (1 + f_att s)
         + wire * (bytes * layers * (1 + f_comm s)) + latency * messages * layers + overhead

is linear in (linear, attn, wire, latency, overhead) once the recompute fractions are known. The two
half lengths are products of coefficients and stay what the profile says. With overlap > 0 the wire
term saturates, so such profiles can only be refitted by `mdcp profile`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megatron_dcp.cost.model import CostModel, Mode, Pack, messages, wire_bytes
from megatron_dcp.cost.profile import CostProfile, Link
from megatron_dcp.errors import ConfigError

TERMS = ("linear", "attention", "wire", "latency", "overhead")


@dataclass(frozen=True, slots=True)
class Coefficients:
    """us per token, us per pair, us per byte, us per message, us per microbatch."""

    linear: float
    attention: float
    wire: float
    latency: float
    overhead: float

    def vector(self) -> NDArray[np.float64]:
        return np.array([getattr(self, t) for t in TERMS])


def check_linear(profile: CostProfile) -> None:
    """Refuse profiles whose time is not linear in the coefficients."""
    o = profile.overlap
    if profile.pairs == "grid" or max(o.ring, o.ulysses, o.allgather) > 0:
        raise ConfigError(
            f"profile {profile.name!r}: pairs {profile.pairs}, overlap {o}: online refit handles "
            "causal and full pairs without overlap; run `mdcp profile` instead"
        )


def features(cost: CostModel, pack: Pack, degree: int, mode: Mode, recompute: int) -> list[float]:
    """What each of TERMS multiplies, for one placement on one stage.

    Wire and latency are in units of the last link row, so that one coefficient serves all rows.
    """
    p, layers, stages = cost.profile, cost.layers, cost.topology.pipeline_stages
    share = recompute / layers
    f = p.recompute_fraction
    linear = (pack.tokens / degree + p.linear_half_tokens) * (1.0 + f.linear * share) / stages
    half = p.attn_half_tokens * degree * (pack.half / 2)
    attention = (pack.pairs + half) / degree * (1.0 + f.attention * share) / stages
    inner, outer = wire_bytes(p, mode, pack.tokens, degree)
    n_inner, n_outer = messages(mode, degree) if degree > 1 else (0, 0)
    unit, own, inside = p.links[-1], p.link(degree), p.link(mode.inner_degree)
    wire = latency = 0.0
    if unit.us_per_byte:
        sent = inner * inside.us_per_byte + outer * own.us_per_byte
        wire = sent / unit.us_per_byte * layers * (1.0 + f.comm * share)
    if unit.latency_us:
        waits = n_inner * inside.latency_us + n_outer * own.latency_us
        latency = waits / unit.latency_us * layers
    return [linear, attention, wire, latency, 1.0]


def coefficients(cost: CostModel) -> Coefficients:
    """Those of a profile; `dot(features, coefficients)` is its time before rounding."""
    p = cost.profile
    unit = p.links[-1]
    return Coefficients(
        linear=p.linear_us_per_token,
        attention=p.attn_us_per_pair,
        wire=unit.us_per_byte,
        latency=unit.latency_us,
        overhead=cost.overhead_us,
    )


def with_coefficients(cost: CostModel, new: Coefficients, name: str) -> CostProfile:
    """The profile with other coefficients; link rows keep their ratios to the last row."""
    p = cost.profile
    unit = p.links[-1]
    wire = new.wire / unit.us_per_byte if unit.us_per_byte else 1.0
    latency = new.latency / unit.latency_us if unit.latency_us else 1.0
    links = tuple(
        Link(
            max_degree=row.max_degree,
            us_per_byte=row.us_per_byte * wire,
            latency_us=row.latency_us * latency,
        )
        for row in p.links
    )
    o = p.overhead_us
    if cost.lockstep == 1:
        o = replace(o, async_=new.overhead)
    else:
        o = replace(o, lockstep=new.overhead)
    return replace(
        p,
        name=name,
        linear_us_per_token=new.linear,
        attn_us_per_pair=new.attention,
        links=links,
        overhead_us=o,
    )
