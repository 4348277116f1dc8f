"""The data ranks of this process: who they are, the groups between them, the wire.

Communicators are few and cannot deadlock:

* One group of all data ranks (and with several planes one of all processes, for agreement) is made
  at construction and carries agreement, gradient reduction and all point-to-point traffic (rings).
  It is our own, never the trainer's: DDP may have all-reduces
  under way on its group, in an order of its own, while a ring step runs.
* All-to-all groups exist for the blocks that plans use: never of size 1, at most a node wide, made
  when a plan first needs them and kept within a budget; beyond it those go that no step has used
  for longest. `torch.distributed.new_group` must be called by every rank
  (its local form derives the group's name from how many groups a rank has, which differs between
  ranks here, and then never meets). Therefore **all** ranks of **all** planes create **all** groups
  of a step, at the step's start, after the digests agreed, in plan order. Equal plans give equal
  caches, so all ranks always agree on what is missing and on what goes.

Planes: with TP or PP there are several DP x CP planes that run the same plan; `planes` lists the
global ranks of each, the same list on every process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_dcp.dist.wire import Wire
from megatron_dcp.errors import ConfigError

Block = tuple[int, int]  # first data rank, number of ranks


class DataWorld:
    """rank: this process' data rank; size: number of data ranks; device: where collectives run.

    group_budget: how many all-to-all groups a rank is kept in; what one step needs may exceed it.
    alone: a world of this rank only, whatever process group exists; it makes no collective.
    """

    def __init__(
        self,
        *,
        planes: Sequence[Sequence[int]] | None = None,
        device: torch.device | str | None = None,
        timeout_s: float | None = None,
        group_budget: int = 16,
        alone: bool = False,
    ) -> None:
        if group_budget < 1:
            raise ConfigError(f"group_budget={group_budget}: use at least 1")
        self.group_budget = group_budget
        self.wire = Wire()
        self.timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        self.device = torch.device(device if device is not None else "cpu")
        self._groups: dict[Block, dist.ProcessGroup] = {}
        self._group: dist.ProcessGroup | None = None
        started = not alone and dist.is_available() and dist.is_initialized()
        everyone = list(range(dist.get_world_size())) if started else [0]
        self.planes = [list(p) for p in planes] if planes is not None else [everyone]
        me = dist.get_rank() if started else 0
        self._check_planes(everyone, me)
        self.global_ranks = next(p for p in self.planes if me in p)
        self.rank = self.global_ranks.index(me)
        self.size = len(self.global_ranks)
        if self.size > 1:
            self._group = self._new_group((0, self.size))
        self._everyone = self._group
        if len(self.planes) > 1:
            self._everyone = dist.new_group(everyone, timeout=self.timeout, group_desc="mdcp all")

    def _check_planes(self, everyone: Sequence[int], me: int) -> None:
        held = sorted(r for p in self.planes for r in p)
        if held != list(everyone) or len({len(p) for p in self.planes}) != 1:
            raise ConfigError(
                f"planes {self.planes} must hold each of the {len(everyone)} ranks of the default "
                "process group once, in planes of equal size"
            )
        for plane in self.planes:
            if plane != sorted(plane):
                raise ConfigError(
                    f"plane {plane} is not ascending; torch numbers the ranks of a group by global "
                    "rank, so data ranks must follow it: lay out the mesh that way"
                )

    @property
    def group(self) -> dist.ProcessGroup:
        """The group of all data ranks; only where there are several."""
        if self._group is None:
            raise ConfigError(
                "there is one data rank and no process group; start several processes (torchrun) "
                "and call torch.distributed.init_process_group first"
            )
        return self._group

    @property
    def everyone(self) -> dist.ProcessGroup | None:
        """All processes of all planes: the data ranks' group where there is one plane."""
        return self._everyone

    @property
    def place(self) -> int:
        """This process' position in `everyone`."""
        return self.rank if len(self.planes) == 1 else self.global_ranks[self.rank]

    def _new_group(self, block: Block) -> dist.ProcessGroup:
        """Called by all ranks alike; returns the group of this rank's plane."""
        first, size = block
        mine: dist.ProcessGroup | None = None
        for plane in self.planes:
            ranks = plane[first : first + size]
            group = dist.new_group(ranks, timeout=self.timeout, group_desc=f"mdcp {first}+{size}")
            if plane is self.global_ranks:
                mine = group
        assert mine is not None
        return mine

    def ensure_groups(self, blocks: Iterable[Block]) -> int:
        """Create the missing groups of a step, in the order given; every rank must call it alike,
        between steps.

        Returns how many were created. Blocks of one rank need none.
        """
        needed = [b for b in dict.fromkeys(blocks) if b[1] > 1]
        for block in needed:  # least recently used first
            if block in self._groups:
                self._groups[block] = self._groups.pop(block)
        missing = [b for b in needed if b not in self._groups]
        while missing and self._fullest([*self._groups, *missing]) > self.group_budget:
            oldest = next(iter(self._groups), None)
            if oldest is None or oldest in needed:
                break
            dist.destroy_process_group(self._groups.pop(oldest))
        for block in missing:
            self._groups[block] = self._new_group(block)
        return len(missing)

    def _fullest(self, blocks: Sequence[Block]) -> int:
        """Most of these blocks that any data rank is in: the same number on every rank."""
        return max(sum(first <= r < first + n for first, n in blocks) for r in range(self.size))

    def block_group(self, first_rank: int, size: int) -> dist.ProcessGroup:
        """The all-to-all group of a block that `ensure_groups` has made."""
        try:
            return self._groups[(first_rank, size)]
        except KeyError:
            raise ConfigError(
                f"no group for data ranks {first_rank}..{first_rank + size - 1}; groups are "
                f"made at the start of a step, this one has {sorted(self._groups)}"
            ) from None

    @property
    def communicators(self) -> int:
        """How many groups this rank is a member of, by our doing."""
        mine = sum(first <= self.rank < first + n for first, n in self._groups)
        return mine + (self._group is not None) + (self._everyone is not self._group)

    def broadcast_(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give all data ranks the values of data rank 0, in place. Collective."""
        if self.size > 1:
            for x in tensors:
                dist.broadcast(x, self.global_ranks[0], group=self.group)

    def rendezvous(self, first_rank: int, size: int) -> None:
        """Wait until all ranks of a block are here: dissemination over the data group, log2 steps.

        Used to tell waiting from communication when times are measured; makes no group.
        """
        me, hop = self.rank - first_rank, 1
        listener, self.wire.listener = self.wire.listener, None
        pacer, self.wire.pacer = self.wire.pacer, None
        try:
            while hop < size:
                token = torch.zeros(1, dtype=torch.uint8, device=self.device)
                heard = torch.empty_like(token)
                to, source = (me + hop) % size, (me - hop) % size
                self.wire.start_exchange(
                    [(token, first_rank + to)],
                    [(heard, first_rank + source)],
                    self.group,
                    "rendezvous",
                ).wait()
                hop *= 2
        finally:
            self.wire.listener, self.wire.pacer = listener, pacer

    def close(self) -> None:
        """Destroy the groups made here (collective only in that every rank should do it)."""
        last = {id(g): g for g in (self._group, self._everyone) if g is not None}
        for group in [*self._groups.values(), *last.values()]:
            dist.destroy_process_group(group)
        self._groups.clear()
        self._group = self._everyone = None
