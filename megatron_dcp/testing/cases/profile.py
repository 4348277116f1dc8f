"""Profiling on several ranks: agreement on times and on running out of memory; resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_dcp.cli.train.model import Gpt, GptConfig, loss_sum
from megatron_dcp.cost import dumps
from megatron_dcp.cost.cases import Case
from megatron_dcp.cost.profile import ModelShape
from megatron_dcp.plan import Topology
from megatron_dcp.runtime.profile import Subject, check_same, profile_model, truncated
from megatron_dcp.testing.cases.attention import cached_world


def small_subject() -> Subject:
    """The reference GPT with 2 layers of width 32."""
    config = GptConfig(hidden=32, layers=2, heads=4, kv_heads=2, ffn=64)
    torch.manual_seed(0)
    shape = ModelShape(
        layers=2, heads=4, kv_heads=2, head_dim=8, hidden=32, vocab=256, element_bytes=4
    )
    return Subject(
        shape=shape,
        build=truncated(Gpt(config), "layers"),
        loss=lambda m, ids, positions, labels: loss_sum(m(ids, positions), labels),
    )


def profile_case(
    *, points: str, oom_rank: int = -1, oom_tokens: int = 0, rounds: int = 1
) -> dict[str, Any]:
    """Profile the small model; `oom_rank` runs out of memory at `oom_tokens` per rank."""
    world, ran = cached_world(), 0

    def fail(case: Case) -> None:
        nonlocal ran
        ran += 1
        if world.rank == oom_rank and case.tokens / case.degree >= oom_tokens:
            raise torch.OutOfMemoryError("made up by the test")

    fitted = profile_model(
        world, small_subject(), Topology(data_ranks=world.size, ranks_per_node=world.size),
        name="small", max_tokens=128, points_file=Path(points), repeats=1, rounds=rounds, fail=fail,
    )  # fmt: skip
    check_same(world, fitted)
    return {"profile": dumps(fitted.profile), "ran": ran, "errors": fitted.errors}
