"""Streams and measured lengths over ranks."""

from __future__ import annotations

from typing import Any

import megatron_dcp as mdcp
from megatron_dcp.errors import MdcpError
from megatron_dcp.testing.cases.attention import cached_world
from megatron_dcp.testing.cases.gradients import Samples, random_lengths, run_step
from megatron_dcp.testing.models import TinyModel
from megatron_dcp.testing.plans import tiny_profile


def stream_case(*, size: int, short_rank: int | None = None) -> dict[str, Any]:
    """Train through a stream to its end; on `short_rank` it has 10 samples only."""
    world = cached_world()
    items = Samples(random_lengths(0, size), 0).items
    if world.rank == short_rank:
        items = items[:10]
    engine = mdcp.initialize(TinyModel(), None, cost=tiny_profile(), world=world, plan_ahead=1)
    loader = engine.dataloader(iter(items), global_batch_size=4, window=8, seed=1)
    out: dict[str, Any] = {"samples": [], "losses": [], "type": "", "error": ""}
    try:
        for step in loader:
            out["samples"].append(step.indices)
            out["losses"].append(run_step(engine, step))
    except MdcpError as error:
        out["type"], out["error"] = type(error).__name__, str(error)
    return out


class Read(Samples):
    """Remembers which items were read."""

    def __init__(self, lengths: list[int], seed: int) -> None:
        super().__init__(lengths, seed)
        self.read: list[int] = []

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return super().__getitem__(index)


def measured_case(*, cache: str, size: int) -> dict[str, Any]:
    """Lengths of a data set without an index, and which items this rank read for them."""
    data = Read(random_lengths(0, size), 0)
    engine = mdcp.initialize(TinyModel(), None, cost=tiny_profile(), world=cached_world())
    try:
        loader = engine.dataloader(
            data, global_batch_size=4, lengths="input_ids", lengths_cache=cache
        )
    except MdcpError as error:
        return {"error": str(error)}
    return {"lengths": list(loader.preparer.lengths), "read": data.read}
