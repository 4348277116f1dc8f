"""Time, bytes and wire bytes of one placement: the formulas of DESIGN.md section 3.

Written with + - * / on doubles in one fixed order; `csrc/planner/cost.h` holds the same lines, so
that Python and C++ agree to the bit. Pair counts are summed as integers, which makes the result
independent of the order of samples. Results are rounded once, to integer microseconds (half up) and
integer bytes (up).

A sample adds to a pack two integers per attention kind: its pairs A, and B = 2 A / L, because
    sum_j A_j / d / eff(L_j / d) = (sum A_j + half * d * sum A_j / L_j) / d
with eff(x) = x / (x + half); likewise T/d / eff(T/d) = T/d + half.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_dcp.cost.profile import CostProfile
from megatron_dcp.errors import ConfigError
from megatron_dcp.plan import Topology, Workload
from megatron_dcp.plan.types import NOMINAL_SPEED


@dataclass(frozen=True, slots=True)
class Pack:
    """Sums over the samples of one placement.

    pairs, pairs2: attention pairs (for `grid`: spatial, temporal); half, half2: sums of 2 A / L.
    """

    tokens: int = 0
    pairs: int = 0
    half: int = 0
    pairs2: int = 0
    half2: int = 0

    def __add__(self, other: Pack) -> Pack:
        return Pack(
            self.tokens + other.tokens,
            self.pairs + other.pairs,
            self.half + other.half,
            self.pairs2 + other.pairs2,
            self.half2 + other.half2,
        )


@dataclass(frozen=True, slots=True)
class Mode:
    """How a placement of some degree is run: scheme, its Ulysses part, recomputed layers."""

    scheme: str
    inner_degree: int


def sample_pack(profile: CostProfile, length: int, shape: Sequence[int] | None = None) -> Pack:
    """The sums of one sample. Grid pairs: spatial f*(h*w)^2, temporal (h*w)*f^2."""
    if profile.pairs == "causal":
        return Pack(length, length * (length + 1) // 2, length + 1)
    if profile.pairs == "full":
        return Pack(length, length * length, 2 * length)
    if shape is None:
        raise ConfigError(
            f"cost profile {profile.name!r} counts pairs on a grid, the workload has no shapes; "
            "pass shapes [[frames, height, width], ...] or a profile with pairs causal or full"
        )
    frames, area = shape[0], shape[1] * shape[2]
    return Pack(length, frames * area * area, 2 * area, area * frames * frames, 2 * frames)


def workload_packs(profile: CostProfile, workload: Workload) -> list[Pack]:
    """One Pack per sample, in sample order."""
    shapes = workload.shapes or [None] * len(workload.lengths)
    return [sample_pack(profile, n, s) for n, s in zip(workload.lengths, shapes, strict=True)]


def pack_of(profile: CostProfile, workload: Workload, samples: Iterable[int]) -> Pack:
    """Sums over some samples of a workload."""
    total = Pack()
    for i in samples:
        shape = None if workload.shapes is None else workload.shapes[i]
        total = total + sample_pack(profile, workload.lengths[i], shape)
    return total


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def wire_bytes(profile: CostProfile, mode: Mode, tokens: int, degree: int) -> tuple[float, float]:
    """Bytes that one rank sends in one layer, forward + backward: (all-to-all, ring or gather).

    The first goes over the link of inner_degree, the second over that of the whole degree.
    """
    x = tokens / degree
    if degree == 1:
        return 0.0, 0.0
    if profile.comm_bytes_per_token_layer is not None:
        return 0.0, profile.comm_bytes_per_token_layer * x
    fwd_u, bwd_u, fwd_r, bwd_r = wire_bytes_parts(profile, mode, tokens, degree)
    return fwd_u + bwd_u, fwd_r + bwd_r


def wire_bytes_parts(
    profile: CostProfile, mode: Mode, tokens: int, degree: int
) -> tuple[float, float, float, float]:
    """(all-to-all forward, backward, ring/gather forward, backward) bytes per rank and layer."""
    m = profile.model
    x = tokens / degree
    e, a = m.element_bytes, max(4, m.element_bytes)
    u = mode.inner_degree
    rep = max(1, _ceil_div(u, m.kv_heads))
    ulysses = 0.0
    if u > 1:
        ulysses = (u - 1) / u * x * ((2 * m.heads + 2 * m.kv_heads * rep) * m.head_dim * e)
    if mode.scheme in ("local", "ulysses"):
        return ulysses, ulysses, 0.0, 0.0
    d = degree // u
    kv_heads = _ceil_div(m.kv_heads * rep, u) if mode.scheme == "hybrid" else m.kv_heads
    # Tokens per ring member: after the inner all-to-all each holds T/d' tokens of fewer heads.
    ring = tokens / d * (2 * kv_heads * m.head_dim)
    forward = (d - 1) * ring * e
    if mode.scheme == "allgather":
        return ulysses, ulysses, forward, (d - 1) * ring * (e + a)
    return ulysses, ulysses, forward, ((d - 1) * e + d * a) * ring


def messages(mode: Mode, degree: int) -> tuple[int, int]:
    """Messages per layer, forward + backward: (all-to-alls, ring steps or gathers).

    Ulysses: two all-to-alls each way. Ring: d-1 forward, d-1 for K/V and d for dK/dV backward.
    Allgather: one gather forward, a gather and a reduce-scatter backward.
    """
    u = mode.inner_degree
    inner = 4 if u > 1 else 0
    if mode.scheme in ("local", "ulysses"):
        return inner, 0
    d = degree // u
    return inner, 3 if mode.scheme == "allgather" else 3 * d - 2


def gathered_bytes(profile: CostProfile, mode: Mode, tokens: int, degree: int) -> float:
    """K/V of one layer that a rank holds besides its own shard."""
    if degree == 1 or profile.comm_bytes_per_token_layer is not None:
        return 0.0
    m = profile.model
    row = 2 * m.kv_heads * m.head_dim * m.element_bytes
    if mode.scheme == "allgather":
        return float(tokens * row)
    if mode.scheme in ("ring", "hybrid"):
        return 2 * (tokens / degree) * row  # double buffer
    return 0.0


def in_flight(topology: Topology) -> float:
    """Microbatches whose activations the first stage holds at once.

    1F1B: p. Interleaved with v chunks: (2 (p-1) + (v-1) p + 1) chunks of 1/v stage each.
    """
    p, v = topology.pipeline_stages, topology.virtual_stages
    return float(p) if v == 1 else (2 * (p - 1) + (v - 1) * p + 1) / v


def layers_per_stage(profile: CostProfile, topology: Topology) -> int:
    """L of the plan: layers per pipeline stage."""
    p = topology.pipeline_stages
    if profile.model.layers % p:
        raise ConfigError(
            f"{profile.model.layers} layers do not divide over {p} pipeline stages; "
            "use a number of stages that divides the layers"
        )
    return profile.model.layers // p


@dataclass(frozen=True, slots=True)
class CostModel:
    """A profile bound to a topology and a lockstep domain."""

    profile: CostProfile
    topology: Topology
    lockstep: int = 1

    @property
    def layers(self) -> int:
        return layers_per_stage(self.profile, self.topology)

    @property
    def overhead_us(self) -> float:
        o = self.profile.overhead_us
        return o.async_ if self.lockstep == 1 else o.lockstep

    def parts_us(
        self, pack: Pack, degree: int, mode: Mode, recompute: int
    ) -> tuple[float, float, float]:
        """(linear, attention, exposed communication) of one stage, us, without the overhead."""
        p = self.profile
        stages, layers = self.topology.pipeline_stages, self.layers
        x = pack.tokens / degree
        share = recompute / layers
        f = p.recompute_fraction
        linear = p.linear_us_per_token * (x + p.linear_half_tokens) / stages
        linear = linear * (1.0 + f.linear * share)
        h = p.attn_half_tokens * degree
        if p.pairs == "grid":
            attn = p.attn_spatial_us_per_pair * ((pack.pairs + h * (pack.half / 2)) / degree)
            attn = attn + p.attn_temporal_us_per_pair * (
                (pack.pairs2 + h * (pack.half2 / 2)) / degree
            )
        else:
            attn = p.attn_us_per_pair * ((pack.pairs + h * (pack.half / 2)) / degree)
        attn = attn / stages
        attn = attn * (1.0 + f.attention * share)
        return linear, attn, self._comm_us(pack.tokens, degree, mode, share, attn)

    def _comm_us(
        self, tokens: int, degree: int, mode: Mode, share: float, attention_us: float
    ) -> float:
        if degree == 1:
            return 0.0
        p, layers = self.profile, self.layers
        inner, outer = wire_bytes(p, mode, tokens, degree)
        n_inner, n_outer = messages(mode, degree)
        link, inner_link = p.link(degree), p.link(mode.inner_degree)
        wire = inner * layers * inner_link.us_per_byte + outer * layers * link.us_per_byte
        wire = wire * (1.0 + p.recompute_fraction.comm * share)
        wire = wire + (n_inner * inner_link.latency_us + n_outer * link.latency_us) * layers
        hidden = self._overlap(mode.scheme) * attention_us
        return wire - hidden if wire > hidden else 0.0

    def _overlap(self, scheme: str) -> float:
        o = self.profile.overlap
        if scheme == "ulysses":
            return o.ulysses
        return o.allgather if scheme == "allgather" else o.ring

    def time_us(
        self,
        pack: Pack,
        degree: int,
        mode: Mode,
        recompute: int,
        speed: int = NOMINAL_SPEED,
    ) -> int:
        """Predicted forward + backward of one placement (one stage), overhead included."""
        linear, attn, comm = self.parts_us(pack, degree, mode, recompute)
        total = linear + attn + comm + self.overhead_us
        if speed != NOMINAL_SPEED:
            total = total * NOMINAL_SPEED / speed
        return math.floor(total + 0.5)

    @property
    def dummy_us(self) -> int:
        """What a dummy (one token on one rank) takes on the slowest rank; 0 without pipeline
        stages, where no dummy is counted."""
        if self.topology.pipeline_stages == 1:
            return 0
        speed = self.topology.block_speed(0, self.topology.data_ranks)
        token = sample_pack(self.profile, 1, (1, 1, 1))
        return self.time_us(token, 1, Mode("local", 1), 0, speed)

    def bytes(self, pack: Pack, degree: int, mode: Mode, recompute: int) -> int:
        """Predicted peak bytes per rank of one placement, on the first pipeline stage."""
        p = self.profile
        x = pack.tokens / degree
        kept = p.kept_bytes_per_token_layer * (self.layers - recompute)
        stored = kept + p.checkpoint_bytes_per_token_layer * recompute
        per_token = stored * in_flight(self.topology)
        per_token = per_token + p.working_bytes_per_token + p.head_bytes_per_token
        total = p.static_bytes + x * per_token
        return math.ceil(total + gathered_bytes(p, mode, pack.tokens, degree))

    def modes(self, degree: int) -> list[Mode]:
        """Schemes that a degree may use here, in the order in which ties are broken."""
        if degree == 1:
            return [Mode("local", 1)]
        m = self.topology.ranks_per_node
        limits = self.profile.head_limits
        if limits.free:
            return [self._free_mode(degree)]
        out = []
        if degree <= m and limits.ulysses_allows(degree):
            out.append(Mode("ulysses", degree))
        out += [Mode("ring", 1), Mode("allgather", 1)]
        inner_ranks = min(degree, m)
        inner = [
            u
            for u in range(inner_ranks, 1, -1)
            if inner_ranks % u == 0 and u < degree and limits.ulysses_allows(u)
        ]
        out += [Mode("hybrid", u) for u in inner]
        return out

    def _free_mode(self, degree: int) -> Mode:
        """Preset a100-gpt7b: one comm term for every scheme; only the name is chosen."""
        m = self.topology.ranks_per_node
        heads = self.profile.model.heads
        if degree <= m:
            return Mode("ulysses", degree) if heads % degree == 0 else Mode("ring", 1)
        inner = math.gcd(m, heads)
        return Mode("hybrid", inner) if inner > 1 else Mode("ring", 1)
