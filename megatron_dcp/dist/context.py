"""The current placement: what attention, RoPE and loss read instead of any static group.

The engine makes a placement current while the user's code runs a microbatch; activation
recomputation makes the one current with which its layer ran forward. There is one current placement
per process and not per thread: autograd runs backward on threads of its own, where a context
variable would be lost. Nothing here is captured at construction of a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dcp.dist.world import DataWorld
from megatron_dcp.errors import ConfigError, PlanError
from megatron_dcp.plan import Placement
from megatron_dcp.plan.shards import ShardMap, shard_map


@dataclass(slots=True, kw_only=True)
class PlacementContext:
    """One placement as one rank of its block sees it.

    shards: who holds which tokens. position_ids [rows] int64: position of each local token inside its
    sample. sample_index [rows] int64: its sample inside the pack, 0..B-1. sample_keys [B] int64: each
    sample's id in the global batch, or the key given for it. sample_ids [rows] int64: the key of each
    row's sample. shapes: per sample (frames, height, width), or None.
    cu_seqlens [B + 1] int32: of the whole pack. documents: per sample, lengths of the documents in
    it (attention stays inside one), or None. prefix: per sample, how many first tokens see each
    other both ways under a causal mask, or None. padded: samples end in padding (shape_quantum), which
    only a causal mask keeps from real tokens. dummy: a token without weight (lockstep). attended:
    whether this package's attention ran for it.

    An empty shard is run with one **filler** row (position 0, sample key -1, weight 0), because models
    reshape by the number of tokens; attention drops it and gives 0 back.
    """

    world: DataWorld
    placement: Placement
    shards: ShardMap
    position_ids: Tensor
    sample_ids: Tensor
    sample_index: Tensor
    sample_keys: Tensor
    cu_seqlens: Tensor
    shapes: tuple[tuple[int, int, int], ...] | None = None
    documents: tuple[tuple[int, ...], ...] | None = None
    prefix: tuple[int, ...] | None = None
    padded: bool = False
    dummy: bool = False
    attended: bool = False
    step: int = 0
    cache: dict[Any, Any] = field(default_factory=dict)  # segment lists and the like, per mask

    @property
    def block_rank(self) -> int:
        return self.world.rank - self.placement.first_rank

    @property
    def degree(self) -> int:
        return self.placement.degree

    @property
    def inner(self) -> int:
        """Ranks of the all-to-all: the Ulysses part."""
        return self.shards.inner

    @property
    def outer(self) -> int:
        """Members of the ring or gather."""
        return self.shards.outer

    @property
    def inner_rank(self) -> int:
        return self.block_rank % self.inner

    @property
    def member(self) -> int:
        """Which outer member this rank belongs to."""
        return self.block_rank // self.inner

    @property
    def tokens(self) -> int:
        """Local tokens of the placement; may be 0."""
        return self.shards.tokens[self.block_rank]

    @property
    def filler(self) -> bool:
        return self.tokens == 0

    @property
    def rows(self) -> int:
        """Rows that the model sees: the local tokens, or the one filler."""
        return self.tokens or 1

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.shards.lengths

    @property
    def max_seqlen(self) -> int:
        return max(self.lengths, default=0)

    def inner_group(self) -> dist.ProcessGroup:
        """The all-to-all group of this rank."""
        first = self.placement.first_rank + self.member * self.inner
        return self.world.block_group(first, self.inner)

    def peer(self, member: int) -> int:
        """Data rank with this rank's inner rank in another outer member."""
        return self.placement.first_rank + member * self.inner + self.inner_rank

    def member_tokens(self, member: int) -> int:
        """Tokens that an outer member holds together."""
        first = member * self.inner
        return sum(self.shards.tokens[first : first + self.inner])


def cu_seqlens_of(lengths: Sequence[int]) -> Tensor:
    """Offsets of packed samples [B + 1]: int32 where they fit, int64 beyond 2**31 - 1 tokens."""
    cu = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    cu[1:] = torch.tensor(list(lengths), dtype=torch.int64).cumsum(0)
    return cu.to(torch.int32) if int(cu[-1]) < 2**31 else cu


def make_context(
    world: DataWorld,
    placement: Placement,
    lengths: Sequence[int],
    *,
    sample_keys: Sequence[int] | None = None,
    documents: Sequence[Sequence[int]] | None = None,
    prefix: Sequence[int] | None = None,
    shapes: Sequence[tuple[int, int, int]] | None = None,
    padded: bool = False,
    dummy: bool = False,
    step: int = 0,
) -> PlacementContext:
    """Build the context of this rank in a placement; `lengths` of its samples in pack order."""
    shards = shard_map(lengths, placement.degree, placement.inner_degree)
    block_rank = world.rank - placement.first_rank
    if not 0 <= block_rank < placement.degree:
        raise PlanError(
            f"rank {world.rank} asked for a placement of ranks {placement.first_rank}.."
            f"{placement.first_rank + placement.degree - 1}"
        )
    keys = torch.tensor(list(placement.samples if sample_keys is None else sample_keys))
    spans = shards.ranks[block_rank]
    positions = [torch.arange(s.start, s.stop) for s in spans]
    index = [torch.full((s.stop - s.start,), s.sample) for s in spans]
    if not spans:
        positions, index = [torch.zeros(1, dtype=torch.int64)], [torch.zeros(1, dtype=torch.int64)]
    sample_index = torch.cat(index)
    sample_ids = keys[sample_index] if spans else torch.full((1,), -1)
    cu = cu_seqlens_of(lengths)
    return PlacementContext(
        world=world,
        placement=placement,
        shards=shards,
        position_ids=torch.cat(positions).to(world.device),
        sample_ids=sample_ids.to(world.device),
        sample_index=sample_index.to(world.device),
        sample_keys=keys.to(world.device),
        cu_seqlens=cu.to(world.device),
        shapes=None if shapes is None else tuple(shapes),
        documents=None if documents is None else tuple(tuple(d) for d in documents),
        prefix=None if prefix is None else tuple(prefix),
        padded=padded,
        dummy=dummy,
        step=step,
    )


def local_context(
    lengths: Sequence[int],
    *,
    world: DataWorld | None = None,
    documents: Sequence[Sequence[int]] | None = None,
    prefix: Sequence[int] | None = None,
    shapes: Sequence[tuple[int, int, int]] | None = None,
) -> PlacementContext:
    """A placement of this rank alone, for evaluation or a model's own tests: no plan needed."""
    world = world or DataWorld(alone=True)
    placement = Placement(
        slot=0, first_rank=world.rank, degree=1, samples=tuple(range(len(lengths)))
    )
    return make_context(
        world, placement, lengths, documents=documents, prefix=prefix, shapes=shapes
    )


_current: list[PlacementContext | None] = [None]


def current_placement() -> PlacementContext:
    """The placement whose microbatch is being run; an error outside of one."""
    context = _current[0]
    if context is None:
        raise ConfigError(
            "no placement is current: mdcp.attention was called outside a microbatch. Iterate the "
            "engine's loader (`for step in loader: for mb in step:`), or for evaluation wrap the "
            "call in `with mdcp.packed([length, ...]):`"
        )
    return context


def current_or_none() -> PlacementContext | None:
    return _current[0]


def set_current(context: PlacementContext | None) -> PlacementContext | None:
    """Make a placement current; returns the one before."""
    before = _current[0]
    _current[0] = context
    return before


@contextmanager
def use_placement(context: PlacementContext | None) -> Iterator[None]:
    """Make a placement current for a while: in backward, recomputation, evaluation."""
    before = set_current(context)
    try:
        yield
    finally:
        set_current(before)


@contextmanager
def packed(
    lengths: Sequence[int],
    *,
    device: torch.device | str | None = None,
    documents: Sequence[Sequence[int]] | None = None,
    prefix: Sequence[int] | None = None,
    shapes: Sequence[tuple[int, int, int]] | None = None,
) -> Iterator[PlacementContext]:
    """Run attention over samples packed on this rank alone, without an engine.

    with mdcp.packed([len_a, len_b]) as pack:
        logits = model(input_ids, position_ids=pack.position_ids)
    """
    context = local_context(
        lengths,
        world=DataWorld(alone=True, device=device),
        documents=documents,
        prefix=prefix,
        shapes=shapes,
    )
    with use_placement(context):
        yield context
