"""A training step over ranks under a given plan, against one process without any plan."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import megatron_dcp as mdcp
from megatron_dcp.dist import DataWorld
from megatron_dcp.plan import StepPlan
from megatron_dcp.planner import PlanRequest, make_plan
from megatron_dcp.runtime import Engine
from megatron_dcp.testing.cases.attention import cached_world
from megatron_dcp.testing.gradients import gradient_error
from megatron_dcp.testing.models import TinyModel, dense_causal, weighted_loss_sum
from megatron_dcp.testing.plans import random_plan, tiny_profile


class Samples:
    """Random token samples; `masked`: the share of labels without weight; `weighted`: tokens and
    samples weigh differently."""

    def __init__(
        self, lengths: list[int], seed: int, *, masked: float = 0.0, weighted: bool = False
    ) -> None:
        self.lengths = lengths
        self.items: list[dict[str, Tensor]] = []
        g = torch.Generator().manual_seed(seed)
        for n in lengths:
            ids = torch.randint(0, 64, (n,), generator=g)
            labels = ids.clone()
            labels[torch.rand(n, generator=g) < masked] = -100
            item = {"input_ids": ids, "labels": labels}
            if weighted:
                item["weights"] = torch.rand(n, generator=g, dtype=torch.float64)
                item["sample_weight"] = 3 * torch.rand((), generator=g, dtype=torch.float64)
            self.items.append(item)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.items[index]


def random_lengths(seed: int, count: int, longest: int = 40) -> list[int]:
    """Mostly short, some long, some of one token."""
    rng = random.Random(seed)
    return [max(1, int(longest * rng.random() ** 3)) for _ in range(count)]


def reference_step(
    model: nn.Module, samples: Samples, indices: list[int], normalize: str
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the global batch in one process, sample by sample, dense attention."""
    total = torch.zeros((), dtype=torch.float64)
    weight = 0.0
    for i in indices:
        item = samples[i]
        ids, labels = item["input_ids"], item["labels"].clone()
        labels = torch.cat([labels[1:], torch.tensor([-100])])
        weights = (labels != -100).double()
        if "weights" in item:
            weights *= torch.cat([item["weights"][1:], torch.zeros(1)])
        if normalize == "sample" and weights.sum():
            weights /= weights.sum()
        weights *= float(item.get("sample_weight", 1.0))
        logits = model(ids, torch.arange(len(ids)), dense_causal)
        total = total + weighted_loss_sum(logits, labels, weights)
        weight += float(weights.sum())
    loss = total / weight if weight else total * 0.0
    torch.autograd.backward(loss)
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach()), grads


def run_step(engine: Engine, step: Any) -> float:
    """The ten lines of the README."""
    for mb in step:
        logits = engine.model(**mb.inputs)
        mb.backward(weighted_loss_sum(logits, mb.labels, mb.weights))
    loss: float = step.finish()
    return loss


def plan_maker(strategy: str | None, seed: int, idle_rank: bool) -> Any:
    """A plan function: random plans, or a strategy of the registry."""

    def make(request: PlanRequest) -> StepPlan:
        if strategy is not None:
            return make_plan(request, strategy)
        return random_plan(request, seed + 1000 * request.step, idle_rank=idle_rank)

    return make


def gradient_case(
    *,
    seed: int,
    samples: int = 9,
    masked: float = 0.0,
    weighted: bool = False,
    idle_rank: bool = False,
    wrapper: str = "bare",
    strategy: str | None = None,
    normalize: str = "token",
    lockstep: str = "auto",
    heads: int = 4,
    kv_heads: int = 2,
    longest: int = 40,
    backend: str | None = None,
    planes: list[list[int]] | None = None,
    ranks_per_node: int | None = None,
    compiled: bool = False,
    quantum: int = 0,
) -> dict[str, Any]:
    """Gradient error of one step of this rank's parameters, and the loss error."""
    data = Samples(random_lengths(seed, samples, longest), seed, masked=masked, weighted=weighted)
    model = TinyModel(seed=seed, heads=heads, kv_heads=kv_heads)
    reference_model = TinyModel(seed=seed, heads=heads, kv_heads=kv_heads)
    world = cached_world() if planes is None else DataWorld(planes=planes, timeout_s=90)
    if compiled:
        model.layers[0].compile(backend="aot_eager", dynamic=True)
    wrapped = wrap(model, wrapper)
    engine = mdcp.initialize(
        wrapped,
        None,
        cost=tiny_profile(head_dim=32 // heads, heads=heads, kv_heads=kv_heads),
        plan_fn=plan_maker(strategy, seed, idle_rank),
        normalize=normalize,
        lockstep=lockstep,
        backend=backend,
        ranks_per_node=ranks_per_node,
        plan_ahead=0,
        world=world,
    )
    loader = engine.dataloader(
        data, global_batch_size=samples, lengths="lengths", seed=seed, shape_quantum=quantum
    )
    step = next(iter(loader))
    loss = run_step(engine, step)
    expected, grads = reference_step(reference_model, data, step.indices, normalize)
    found = whole_gradients(model)
    error, where = gradient_error(found, grads)
    return {
        "error": error,
        "where": where,
        "loss_error": abs(loss - expected) / max(abs(expected), 1e-300),
        "loss": loss,
        "lockstep": engine.lockstep,
        "degrees": sorted({p.degree for p in step.plan.placements}),
        "microbatches": len(step),
        "padding": step.padding,
        "dummies": sum(mb.dummy for mb in step.microbatches),
        "schemes": sorted({mb.placement.scheme for mb in step.microbatches}),
        "recomputed": max((mb.recompute for mb in step.microbatches), default=0),
        "extra": sorted(set(found) - set(grads)),
    }


def wrap(model: nn.Module, wrapper: str) -> nn.Module:
    """The model as a user would wrap it; hsdp: copies on every two ranks."""
    if wrapper == "ddp":
        return DistributedDataParallel(model) if dist.is_initialized() else model
    if wrapper in ("fsdp2", "hsdp"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        size = dist.get_world_size()
        if wrapper == "hsdp":
            mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("replicate", "shard"))
        else:
            mesh = init_device_mesh("cpu", (size,))
        for layer in model.layers:  # type: ignore[union-attr]
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def whole(x: Tensor) -> Tensor:
    """A tensor in full. Collective for a sharded one."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Gradients by parameter name, sharded ones in full. Collective for these."""

    return {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
