"""Traps that integrations of others fell into, each made to happen on the real packages."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import megatron_dcp as mdcp
from megatron_dcp.errors import MdcpError
from megatron_dcp.planner import PlanRequest
from megatron_dcp.runtime.backend import detect
from megatron_dcp.schemes import attention
from megatron_dcp.testing.cases.attention import cached_world
from megatron_dcp.testing.cases.backends import (
    LEARNING_RATE,
    deepspeed_world,
    random_plans,
    whole_parameters,
    zero_config,
)
from megatron_dcp.testing.cases.gradients import Samples, random_lengths, reference_step, run_step
from megatron_dcp.testing.models import Attend, TinyModel
from megatron_dcp.testing.plans import plan_request, random_plan, tiny_profile

RARE_TOKEN = 7


def naive_zero_case(*, stage: int) -> dict[str, Any]:
    """Two backwards and one step, as a stock loop would accumulate at accumulation 1.

    Returns the largest parameter difference from the right update: it is large, without any error.
    """
    import deepspeed

    deepspeed_world()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    right = copy.deepcopy(model)
    data = [torch.full((1, 4), float(i + 1)) for i in range(2)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=zero_config(f"zero{stage}")
    )
    for x in data:
        engine.backward(engine(x).sum(), scale_wrt_gas=False)
    engine.step()
    torch.autograd.backward([right(x).sum() for x in data])
    torch.optim.SGD(right.parameters(), lr=0.1).step()
    pairs = zip(engine.module.parameters(), right.parameters(), strict=True)
    return {"error": max(float((a - b).abs().max()) for a, b in pairs)}


def refusal_case(*, kind: str) -> str:
    """The message with which a wrapper is refused."""
    inner = nn.Sequential(nn.Linear(2, 2))
    try:
        if kind == "static_graph":
            detect(nn.parallel.DistributedDataParallel(inner, static_graph=True))
        elif kind == "data_parallel":
            detect(nn.DataParallel(inner))
        elif kind == "averaged":
            detect(torch.optim.swa_utils.AveragedModel(inner))
        elif kind == "fsdp1":
            from torch.distributed.fsdp import FullyShardedDataParallel

            detect(FullyShardedDataParallel(inner, device_id=torch.device("cpu")))
        elif kind == "unknown":
            detect(_Wrapper(inner))
        elif kind == "not_admitted":
            detect(nn.parallel.DistributedDataParallel(inner), name="zero3")
        elif kind == "accumulation":
            import deepspeed

            deepspeed_world()
            config = zero_config("zero1") | {"gradient_accumulation_steps": 4}
            optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
            engine, *_ = deepspeed.initialize(model=inner, optimizer=optimizer, config=config)
            mdcp.initialize(engine, cost=tiny_profile(), world=cached_world())
    except MdcpError as error:
        return str(error)
    return ""


class _Wrapper(nn.Module):
    """What a wrapper of another library looks like."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def unaligned_plan_case() -> str:
    """An asynchronous plan under FSDP2: it would deadlock; the message with which it is refused."""
    from torch.distributed.fsdp import fully_shard

    model = TinyModel()
    fully_shard(model)

    def asynchronous(request: PlanRequest) -> Any:
        lengths = request.workload.lengths
        return random_plan(plan_request(lengths, request.topology.data_ranks), 1)

    engine = mdcp.initialize(
        model, None, cost=tiny_profile(), plan_fn=asynchronous, world=cached_world(), plan_ahead=0
    )
    loader = engine.dataloader(Samples([5, 9, 2, 12], 0), global_batch_size=4, lengths="lengths")
    try:
        next(iter(loader))
    except MdcpError as error:
        return str(error)
    return ""


class ConditionalModel(TinyModel):
    """A layer that only microbatches with the rare token go through."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.rare = nn.Linear(self.embedding.embedding_dim, self.embedding.embedding_dim)
        self.rare.to(self.embedding.weight.dtype)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, attend: Attend = attention
    ) -> Tensor:
        x = self.embedding(input_ids)
        chosen = input_ids == RARE_TOKEN
        if bool(chosen.any()):
            x = x + self.rare(x) * chosen.unsqueeze(-1).to(x.dtype)
        for layer in self.layers:
            x = layer(x, position_ids, attend)
        logits: Tensor = self.head(x)
        return logits


def unused_parameter_case(*, kind: str, seed: int) -> dict[str, Any]:
    """Steps of a model with a layer that only one sample of each batch uses."""
    dtype = torch.float32 if kind.startswith("zero") else torch.float64
    data = Samples(random_lengths(seed, 16), seed)
    for i, item in enumerate(data.items):
        ids = item["input_ids"]
        ids[ids == RARE_TOKEN] = RARE_TOKEN + 1
        if i % 8 == 0:
            ids[0] = RARE_TOKEN
        item["labels"] = ids.clone()
    model = ConditionalModel(seed=seed, dtype=dtype)
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    wrapped: Any = model
    if kind == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    elif kind.startswith("zero"):
        import deepspeed

        deepspeed_world()
        wrapped, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=zero_config(kind)
        )
    elif kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    engine = mdcp.initialize(
        wrapped, optimizer, cost=tiny_profile(), plan_fn=random_plans(seed, False), plan_ahead=0,
        world=cached_world(),
    )  # fmt: skip
    loader = engine.dataloader(
        data, global_batch_size=8, lengths="lengths", seed=seed, shuffle=False
    )
    update = torch.optim.SGD(reference.parameters(), lr=LEARNING_RATE)
    users = microbatches = 0
    for step in loader:
        users += sum(bool((mb.inputs["input_ids"] == RARE_TOKEN).any()) for mb in step.microbatches)
        microbatches += len(step)
        run_step(engine, step)
        reference_step(reference, data, step.indices, "token")
        update.step()
        update.zero_grad()
    found = whole_parameters(engine)
    return {
        "error": max(
            float((found[n] - p.detach()).abs().max()) for n, p in reference.named_parameters()
        ),
        "users": users,
        "microbatches": microbatches,
        "rank": dist.get_rank(),
    }
