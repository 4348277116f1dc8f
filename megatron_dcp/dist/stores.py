"""The job's store for one object of ours: its own connection, keys that no other object has."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from megatron_dcp.dist.agree import gather_bytes
from megatron_dcp.dist.world import DataWorld


def job_store(world: DataWorld, name: str) -> Any:
    """A store that all processes of all planes share; collective over them.

    The connection is a new one: on the default one a waiting request locks out all others.
    """
    default: Any = dist.distributed_c10d._get_default_store()
    mine = b""
    if world.global_ranks[world.rank] == 0:
        mine = str(default.add(f"mdcp/{name}", 1)).encode()
    number = gather_bytes(world, mine, everyone=True)[0].decode()
    return dist.distributed_c10d.PrefixStore(f"mdcp/{name}/{number}", default.clone())
