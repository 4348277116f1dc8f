"""The plan as data: Workload, Topology, Placement, StepPlan.

Frozen, no tensors, no callables. A StepPlan says completely how one optimizer step is run; code
above it only makes plans, code below only executes them.

Invariants of construction: placements are sorted by (slot, first_rank, -degree) and the samples of
each placement ascend, so that two equal plans are equal objects with equal bytes. Everything else
is checked by `megatron_dcp.plan.check`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from megatron_dcp.errors import ConfigError, PlanError

Scheme = Literal["local", "ulysses", "ring", "allgather", "hybrid"]
RecomputeKind = Literal["layers", "selective"]
SCHEMES: tuple[str, ...] = get_args(Scheme)
RECOMPUTE_KINDS: tuple[str, ...] = get_args(RecomputeKind)
NOMINAL_SPEED = 1000  # per mille
MAX_LENGTH = 2**31 - 1  # tokens of one sample: its attention pairs stay inside 64 bits
MAX_RANKS = 2**20  # data ranks, pipeline stages
MAX_SPEED = 1_000_000  # per mille


def _whole(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The data ranks of one DP x CP plane.

    speed: None, or one integer per data rank in per mille of the nominal speed.
    """

    data_ranks: int
    ranks_per_node: int
    pipeline_stages: int = 1
    virtual_stages: int = 1
    speed: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        n, m = self.data_ranks, self.ranks_per_node
        for name in ("data_ranks", "ranks_per_node", "pipeline_stages", "virtual_stages"):
            value = getattr(self, name)
            if not _whole(value, MAX_RANKS):
                raise ConfigError(
                    f"topology: {name} must be an integer in 1..{MAX_RANKS}, found {value!r}"
                )
        if self.virtual_stages > 1 and self.pipeline_stages == 1:
            raise ConfigError(
                f"topology: virtual_stages {self.virtual_stages} interleave the layers of pipeline "
                "stages, and pipeline_stages is 1; use pipeline_stages >= 2, or virtual_stages 1"
            )
        if m > n:
            raise ConfigError(
                f"topology: ranks_per_node {m} is larger than data_ranks {n}; "
                f"pass at most {n} (one node that holds every rank)"
            )
        if n % m:
            raise ConfigError(
                f"topology: {n} data ranks do not fill whole nodes of {m}; "
                f"data_ranks must be a multiple of ranks_per_node or at most one node"
            )
        if self.speed is not None:
            object.__setattr__(self, "speed", tuple(self.speed))
            if len(self.speed) != n or not all(_whole(s, MAX_SPEED) for s in self.speed):
                raise ConfigError(
                    f"topology: speed needs {n} integers in 1..{MAX_SPEED} (per mille, one per "
                    f"data rank), found {list(self.speed)!r}"
                )

    @property
    def nodes(self) -> int:
        return self.data_ranks // self.ranks_per_node

    def microbatches(self, slots: int) -> int:
        """Microbatches of every rank with pipeline stages: the slots, and with interleaving as
        many more as make a multiple of the stages."""
        group = self.pipeline_stages if self.virtual_stages > 1 else 1
        return -(-slots // group) * group

    def legal_degree(self, degree: int) -> bool:
        """1..M inside a node, or whole nodes up to N."""
        if 1 <= degree <= self.ranks_per_node:
            return True
        m = self.ranks_per_node
        return m < degree <= self.data_ranks and degree % m == 0

    def degrees(self) -> list[int]:
        """Every degree that the topology allows, ascending."""
        m = self.ranks_per_node
        return [*range(1, m + 1), *range(2 * m, self.data_ranks + 1, m)]

    def block_fits(self, first_rank: int, degree: int) -> bool:
        """A block lies inside one node, or is whole nodes."""
        m = self.ranks_per_node
        if first_rank < 0 or first_rank + degree > self.data_ranks or degree < 1:
            return False
        if degree <= m:
            return first_rank // m == (first_rank + degree - 1) // m
        return first_rank % m == 0 and degree % m == 0

    def block_speed(self, first_rank: int, degree: int) -> int:
        """Speed of the slowest rank of a block, per mille: it sets the pace of the block."""
        if self.speed is None:
            return NOMINAL_SPEED
        return min(self.speed[first_rank : first_rank + degree])


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The global batch: lengths in tokens, in sample order; shapes (frames, height, width) or None.

    Height and width are in patches: length = frames * height * width.
    """

    lengths: tuple[int, ...]
    shapes: tuple[tuple[int, int, int], ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", tuple(self.lengths))
        for i, length in enumerate(self.lengths):
            if not _whole(length, MAX_LENGTH):
                raise ConfigError(
                    f"workload: sample {i} has length {length!r}; lengths are integers in "
                    f"1..{MAX_LENGTH} "
                    f"(drop empty samples first, e.g. with `empty='drop'` in the loader)"
                )
        if self.shapes is not None:
            shapes = tuple((int(f), int(h), int(w)) for f, h, w in self.shapes)
            object.__setattr__(self, "shapes", shapes)
            if len(shapes) != len(self.lengths):
                raise ConfigError(f"workload: {len(self.lengths)} lengths but {len(shapes)} shapes")
            for i, (shape, length) in enumerate(zip(shapes, self.lengths, strict=True)):
                if min(shape) < 1 or shape[0] * shape[1] * shape[2] != length:
                    raise ConfigError(
                        f"workload: sample {i} has shape {shape} "
                        f"but length {length}; frames * height * width must equal the length"
                    )

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def rounded(self, quantum: int) -> Workload:
        """Every length up to a multiple of `quantum` (0: as they are): fewer distinct shapes."""
        if quantum < 0:
            raise ConfigError(f"shape quantum {quantum}: use a number of tokens, or 0 for none")
        if not quantum:
            return self
        if self.shapes is not None:
            raise ConfigError(
                f"shape quantum {quantum}: samples with shapes cannot be padded at their end; use 0"
            )
        return Workload(lengths=tuple(-(-n // quantum) * quantum for n in self.lengths))


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Samples packed together on one block in one slot: one microbatch of each rank of the block.

    time_us: predicted forward + backward, overhead included, on this block (its slowest rank).
    bytes: predicted peak bytes per rank.
    """

    slot: int
    first_rank: int
    degree: int
    samples: tuple[int, ...]
    scheme: str = "local"
    inner_degree: int = 1
    recompute: int = 0
    recompute_kind: str = "layers"
    fused: bool = False
    time_us: int = 0
    bytes: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", tuple(sorted(self.samples)))

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.degree)

    @property
    def order(self) -> tuple[int, int, int]:
        return (self.slot, self.first_rank, -self.degree)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRef:
    """Which cost profile a plan was made with: its name and digest (16 hex digits)."""

    name: str
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """How one optimizer step is run on every data rank."""

    strategy: str
    algorithm: str
    topology: Topology
    lockstep: int
    cost: CostRef
    budget_bytes: int
    layers: int
    workload: Workload
    placements: tuple[Placement, ...]
    makespan_us: int
    lower_bound_us: int
    step: int = 0
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "placements", tuple(sorted(self.placements, key=_order)))

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.workload.lengths

    @property
    def gap(self) -> float:
        """makespan / lower bound - 1."""
        return self.makespan_us / self.lower_bound_us - 1.0 if self.lower_bound_us else 0.0

    @property
    def slots(self) -> int:
        """Number of slots of the step: last used slot + 1."""
        return max((p.slot for p in self.placements), default=-1) + 1

    @property
    def microbatches(self) -> int:
        """Microbatches of every rank with pipeline stages."""
        return self.topology.microbatches(self.slots)

    def of_rank(self, rank: int) -> list[Placement]:
        """The placements of one rank in the order in which it runs them."""
        if not 0 <= rank < self.topology.data_ranks:
            raise PlanError(f"rank {rank} asked, the plan has {self.topology.data_ranks}")
        return [p for p in self.placements if p.first_rank <= rank < p.first_rank + p.degree]

    def tokens_of(self, placement: Placement) -> int:
        return sum(self.workload.lengths[i] for i in placement.samples)


def _order(placement: Placement) -> tuple[int, int, int]:
    return placement.order


def lockstep_ranks(value: int | str, topology: Topology) -> int:
    """Ranks per lockstep domain from `1 | node | all | INT`; checks that domains tile the ranks."""
    n = topology.data_ranks
    names: dict[str, int] = {"node": topology.ranks_per_node, "all": n}
    try:
        ranks = names.get(str(value)) or int(value)
    except ValueError:
        raise ConfigError(f"lockstep: found {value!r}; use 1, node, all or an integer") from None
    if ranks < 1 or n % ranks:
        raise ConfigError(
            f"lockstep: domains of {ranks} ranks do not tile {n} data ranks; use a divisor of {n}"
        )
    return ranks
