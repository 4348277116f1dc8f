"""Planes of data ranks out of a DeviceMesh: DP x CP varies inside a plane, TP and PP between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_dcp.errors import ConfigError

DATA_NAMES = ("dp_replicate", "dp_shard", "dp", "data", "replicate", "shard", "fsdp", "cp")
STAGE_NAMES = ("pp", "stage", "pipe")


def data_dims_of(mesh: Any, asked: Sequence[str] | None = None) -> tuple[str, ...]:
    """The dimensions of a mesh that count data ranks: as asked, else those of the usual names."""
    names = mesh.mesh_dim_names
    if not names:
        raise ConfigError(
            "the mesh has no names for its dimensions; make it with init_device_mesh(..., "
            "mesh_dim_names=('pp', 'dp', 'tp'))"
        )
    chosen = tuple(asked) if asked is not None else tuple(n for n in names if n in DATA_NAMES)
    unknown = [n for n in chosen if n not in names]
    if unknown or not chosen:
        raise ConfigError(
            f"data_dims {list(chosen)} asked, the mesh has {list(names)}; name the dimensions over "
            "which samples are distributed (data and context parallelism)"
        )
    return chosen


def planes_of(mesh: Any, data_dims: Sequence[str] | None = None) -> list[list[int]]:
    """Global ranks of each plane, in data-rank order: the data dimensions in the mesh's order."""
    names = list(mesh.mesh_dim_names or ())
    chosen = data_dims_of(mesh, data_dims)
    inside = [i for i, n in enumerate(names) if n in chosen]
    between = [i for i in range(len(names)) if i not in inside]
    ranks = mesh.mesh.permute(*between, *inside)
    size = 1
    for i in inside:
        size *= int(mesh.mesh.shape[i])
    found: list[list[int]] = ranks.reshape(-1, size).tolist()
    return found


def stage_group_of(mesh: Any) -> Any:
    """The group of the pipeline stages of this process' column, or None without a stage dimension."""
    names = mesh.mesh_dim_names or ()
    for name in STAGE_NAMES:
        if name in names and mesh[name].size() > 1:
            return mesh.get_group(name)
    return None
