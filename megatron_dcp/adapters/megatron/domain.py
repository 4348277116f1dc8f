"""Where this process stands in Megatron's grid: data rank, planes, lockstep, who reads data.

Data ranks are the ranks of Megatron's DP x CP group, in its order; TP and PP make planes that run
the same plan. Everything is read from `megatron.core.parallel_state` after it was initialised, once
per run; nothing here is kept by a model.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import pairwise
from math import gcd
from typing import Any

import torch
import torch.distributed as dist

from megatron_dcp.adapters.megatron import standins
from megatron_dcp.dist import DataWorld
from megatron_dcp.errors import AdapterError
from megatron_dcp.plan import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """The grid around this process.

    lockstep: ranks per lockstep domain (1: none). cp: static CP ranks per data-parallel rank;
    they hold the same samples. tp_group, mp_group: tensor-parallel and TP x PP groups.
    virtual: chunks per stage (1: no interleaving).
    """

    world: DataWorld
    topology: Topology
    lockstep: int
    cp: int
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    virtual: int
    tp_group: Any
    mp_group: Any

    @property
    def mp_size(self) -> int:
        return self.tp_size * self.pp_size

    def owner(self, dp_rank: int) -> int:
        """The data rank that gives away the samples which a data-parallel rank has read."""
        return dp_rank * self.cp


def _gather_rows(row: list[int], device: torch.device) -> list[list[int]]:
    """Equal-length integer rows of every process. Collective over the world."""
    mine = torch.tensor(row, dtype=torch.int64, device=device)
    n = dist.get_world_size()
    out = torch.empty(n * len(row), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(out, mine)
    return [[int(x) for x in r] for r in out.view(n, len(row)).tolist()]


def _ranks_per_node(planes: list[list[int]]) -> int:
    """Consecutive data ranks of one plane that share a node; the least over planes."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    found = 0
    for plane in planes:
        run = 1
        for a, b in pairwise(plane):
            if a // local == b // local:
                run += 1
            else:
                found, run = gcd(found, run), 1
        found = gcd(found, run)
    return found


def _lockstep(planes: list[list[int]], expert_groups: list[list[int]]) -> int:
    """Smallest aligned block of data ranks that holds every expert group."""
    place = {rank: i for plane in planes for i, rank in enumerate(plane)}
    n = len(planes[0])
    for size in range(1, n + 1):
        if n % size == 0 and all(
            len({place[r] // size for r in group}) == 1 for group in expert_groups
        ):
            return size
    return n


def expert_group(ps: Any) -> Any:
    """The group inside which expert tokens travel, or None where they stay on their rank.

    Expert tensor parallelism alone makes them travel, too: it may be wider than that of the rest.
    """
    group = ps.get_expert_tensor_and_model_parallel_group()
    return None if dist.get_world_size(group) == 1 else group


def build_domain(*, timeout_s: float | None = None) -> Domain:
    """Read Megatron's groups and make ours. Collective over all processes."""
    from megatron.core import parallel_state as ps

    if not ps.model_parallel_is_initialized():
        raise AdapterError(
            "Megatron: looked for initialised parallel groups, found none; call "
            "parallel_state.initialize_model_parallel before MegatronDcp"
        )
    # The stand-ins' cuda index means the CPU.
    device = torch.device("cpu")
    if standins.gpu_present():
        device = torch.device("cuda", torch.cuda.current_device())
    plane = dist.get_process_group_ranks(ps.get_data_parallel_group(with_context_parallel=True))
    planes = sorted({tuple(r) for r in _gather_rows(list(plane), device)})
    listed = [list(p) for p in planes]
    world = DataWorld(planes=listed, device=device, timeout_s=timeout_s)
    experts = expert_group(ps)
    lockstep = 1
    if experts is not None:
        groups = _gather_rows(dist.get_process_group_ranks(experts), device)
        lockstep = _lockstep(listed, groups)
    pp = ps.get_pipeline_model_parallel_world_size()
    virtual = ps.get_virtual_pipeline_model_parallel_world_size() or 1
    return Domain(
        world=world,
        topology=Topology(
            data_ranks=world.size,
            ranks_per_node=_ranks_per_node(listed),
            pipeline_stages=pp,
            virtual_stages=virtual,
        ),
        lockstep=lockstep,
        cp=ps.get_context_parallel_world_size(),
        tp_rank=ps.get_tensor_model_parallel_rank(),
        tp_size=ps.get_tensor_model_parallel_world_size(),
        pp_rank=ps.get_pipeline_model_parallel_rank(),
        pp_size=pp,
        virtual=virtual,
        tp_group=ps.get_tensor_model_parallel_group(),
        mp_group=ps.get_model_parallel_group(),
    )
