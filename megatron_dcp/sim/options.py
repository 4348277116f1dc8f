"""What a replay adds to the plain cost model: contention, noise, the end of the step."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dcp.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Contention:
    """Shared links. Full rate is what one rank's link row in the profile says.

    fabric_senders: cross-node transfers that the network between nodes carries at full rate at
    once (None: non-blocking). node_senders: the same for the ranks of one node on their fast link
    (None: a switch; 1: one shared bus, as loopback on a CPU).
    """

    fabric_senders: float | None = None
    node_senders: float | None = None

    def __post_init__(self) -> None:
        for name in ("fabric_senders", "node_senders"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"contention: {name} is {value!r}, it must be > 0 or None")

    @property
    def on(self) -> bool:
        return self.fabric_senders is not None or self.node_senders is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Lognormal factors on placement times, median 1. seed: with the step number, makes the draw.

    slot: sigma of each (placement, rank), drawn anew every time. rank: sigma of each rank, the same
    in every step of a seed. A block runs at the pace of its slowest rank.
    """

    slot: float = 0.0
    rank: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.slot <= 10 and 0 <= self.rank <= 10):
            raise ConfigError(
                f"noise: sigmas of a logarithm lie in 0..10, found {self.slot} and {self.rank}"
            )

    @property
    def on(self) -> bool:
        return self.slot > 0 or self.rank > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """How one plan is replayed.

    parameters: weights of the whole model (None: counted from the profile's shape). gradients are
    `gradient_bytes` each, weights `profile.model.element_bytes`. overlap_reduction: the reduction
    may start under the last backward (DDP, Megatron's overlap); default off, as in the engine's own
    flat reduction. With it, plans that end in short microbatches hide less than those that end in
    long ones. keep_spans: record (rank, placement) spans for figures.
    """

    contention: Contention = Contention()
    noise: Noise = Noise()
    parameters: int | None = None
    gradient_bytes: int = 4
    overlap_reduction: bool = False
    keep_spans: bool = False
