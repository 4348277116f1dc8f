"""Dispatch over ranks: index-based reading and exchange-based routing."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

import megatron_dcp as mdcp
from megatron_dcp.dispatch import exchange
from megatron_dcp.errors import MdcpError
from megatron_dcp.plan import StepPlan
from megatron_dcp.plan.shards import shard_map
from megatron_dcp.testing.cases.attention import cached_world
from megatron_dcp.testing.cases.gradients import random_lengths
from megatron_dcp.testing.models import TinyModel
from megatron_dcp.testing.plans import plan_request, random_plan, tiny_profile

DTYPES = (
    "int64", "int32", "int8", "uint8", "bool", "bfloat16", "float16", "float32", "float64",
    "complex64",
)  # fmt: skip


def payload(sample: int, length: int, dtype: str, trailing: tuple[int, ...]) -> Tensor:
    """Values that name their sample and position, as far as the dtype can hold them."""
    x = sample * 7 + torch.arange(length).reshape(-1, *[1] * len(trailing))
    columns = torch.arange(trailing[-1] if trailing else 1)
    x = (x + columns).remainder(2 if dtype == "bool" else 120)
    x = x.expand(length, *trailing) if trailing else x.reshape(length, -1)[:, 0]
    return x.to(getattr(torch, dtype)).contiguous()


def exchange_case(
    *,
    seed: int,
    samples: int = 10,
    dtype: str = "int64",
    trailing: list[int] | None = None,
    owner: str = "random",
) -> dict[str, Any]:
    """Route samples that sit on random ranks; compare with cutting them locally."""
    world = cached_world()
    lengths = random_lengths(seed, samples, 50)
    plan = random_plan(plan_request(lengths, world.size), seed)
    rng = random.Random(seed)
    owners = [0 if owner == "first" else rng.randrange(world.size) for _ in lengths]
    fields = {"ids": ("int64", ()), "extra": (dtype, tuple(trailing or ()))}
    everything = {
        i: {n: payload(i, length, d, t) for n, (d, t) in fields.items()}
        for i, length in enumerate(lengths)
    }
    owned = {i: x for i, x in everything.items() if owners[i] == world.rank}
    before = world.wire.sent["exchange"]
    got = exchange(world, plan, owners, owned)
    equal = True
    for placement, shard in got:
        shards = shard_map(
            [lengths[i] for i in placement.samples], placement.degree, placement.inner_degree
        )
        for n in fields:
            parts = [
                everything[placement.samples[s.sample]][n][s.start : s.stop]
                for s in shards.ranks[world.rank - placement.first_rank]
            ]
            want = torch.cat([everything[0][n][:0], *parts])
            equal &= shard[n].dtype == want.dtype and torch.equal(shard[n], want)
    return {"equal": equal, "placements": len(got), "sent": world.wire.sent["exchange"] - before}


def exchange_error(*, fault: str) -> dict[str, Any]:
    """Faults of the caller are named on the rank that made them, or on all."""
    world = cached_world()
    plan: StepPlan = random_plan(plan_request([5, 9, 3, 4], world.size), 0)
    owners = [i % world.size for i in range(4)]
    owned: dict[int, dict[str, Tensor]] = {
        i: {"ids": torch.zeros(n, dtype=torch.int64)}
        for i, n in enumerate(plan.lengths)
        if owners[i] == world.rank
    }
    if fault == "dtype" and world.rank == 1:
        owned = {i: {"ids": x["ids"].int()} for i, x in owned.items()}
    if fault == "length":
        owned = {i: {"ids": x["ids"][:-1]} for i, x in owned.items()}
    if fault == "missing":
        owned = {}
    if fault == "missing on rank 1" and world.rank == 1:
        owned = {}
    try:
        exchange(world, plan, owners, owned)
    except MdcpError as error:
        return {"error": str(error), "type": type(error).__name__}
    return {"error": "", "type": ""}


class Recorded:
    """A data set that remembers what was read from it."""

    def __init__(self, lengths: list[int], *, documents: bool = False) -> None:
        self.lengths, self.read, self.documents = lengths, list[int](), documents

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read.append(index)
        n = self.lengths[index]
        item: dict[str, Any] = {
            "input_ids": (torch.arange(n) + index) % 64,
            "grid": torch.stack([torch.full((n,), index), torch.arange(n)], dim=1),
        }
        if self.documents:
            item["documents"] = [n // 2, n - n // 2]
        return item


def index_case(*, seed: int, samples: int = 9) -> dict[str, Any]:
    """What one rank reads and gets in a step."""
    world = cached_world()
    data = Recorded(random_lengths(seed, samples))
    engine = mdcp.initialize(
        TinyModel(),
        cost=tiny_profile(),
        world=world,
        plan_ahead=0,
        plan_fn=lambda request: random_plan(request, seed),
    )
    step = next(iter(engine.dataloader(data, global_batch_size=samples, lengths="lengths")))
    rows, wrong = [], 0
    for mb in step.microbatches:
        mine = [step.indices[i] for i in mb.placement.samples]
        for sample, position, ids, label, weight, grid in zip(
            mb.context.sample_ids.tolist(),
            mb.position_ids.tolist(),
            mb.inputs["input_ids"].tolist(),
            mb.labels.tolist(),
            mb.weights.tolist(),
            mb.inputs["grid"].tolist(),
            strict=True,
        ):
            if sample < 0:
                continue
            last = position == data.lengths[sample] - 1
            ok = sample in mine and ids == (position + sample) % 64 and grid == [sample, position]
            ok &= weight == (0.0 if last else 1.0)
            ok &= label == (-100 if last else (position + 1 + sample) % 64)
            wrong += not ok
            rows.append([sample, position])
    own = {step.indices[i] for mb in step.microbatches for i in mb.placement.samples}
    return {
        "rows": rows,
        "wrong": wrong,
        "read": sorted(set(data.read)),
        "own": sorted(own),
        "denominator": step.denominator,
        "lengths": data.lengths,
    }
