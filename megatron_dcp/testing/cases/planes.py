"""TP = 2 and PP = 2 beside data ranks, torch's own building blocks, against one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import megatron_dcp as mdcp
from megatron_dcp.dist import planes_of
from megatron_dcp.plan import StepPlan, digest
from megatron_dcp.planner import PlanRequest
from megatron_dcp.schemes import attention
from megatron_dcp.testing.cases.gradients import Samples, plan_maker, random_lengths, reference_step
from megatron_dcp.testing.gradients import gradient_error
from megatron_dcp.testing.models import Attend, TinyModel, rotate, weighted_loss_sum
from megatron_dcp.testing.plans import tiny_profile

HEADS, KV_HEADS, HIDDEN = 4, 2, 32


class SplitLayer(nn.Module):
    """A layer whose projections can be cut by heads: q, k and v apart."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        kv = KV_HEADS * dim
        self.norm, self.mlp_norm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.q, self.k, self.v = (nn.Linear(HIDDEN, n) for n in (HIDDEN, kv, kv))
        self.proj = nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        n = self.norm(x)
        q, k, v = (f(n).view(x.shape[0], -1, self.dim) for f in (self.q, self.k, self.v))
        out = attend(rotate(q, position_ids), rotate(k, position_ids), v)
        x = x + self.proj(out.reshape(x.shape[0], -1))
        whole: Tensor = x + self.down(nn.functional.gelu(self.up(self.mlp_norm(x))))
        return whole


class SplitModel(TinyModel):
    """The tiny model with such layers."""

    def __init__(self, seed: int) -> None:
        super().__init__(heads=HEADS, kv_heads=KV_HEADS, hidden=HIDDEN, seed=seed)
        self.layers = nn.ModuleList(SplitLayer(HIDDEN // HEADS) for _ in range(2))
        self.double()


def _data(seed: int) -> Samples:
    return Samples(random_lengths(seed, 18, 40), seed)


class CountedPlans:
    """A plan function that counts how often it was asked."""

    def __init__(self, seed: int) -> None:
        self.calls = 0
        self._make = plan_maker(None, seed, False)

    def __call__(self, request: PlanRequest) -> StepPlan:
        self.calls += 1
        plan: StepPlan = self._make(request)
        return plan


def _reference(seed: int, model: nn.Module, indices: list[int], max_norm: float) -> Any:
    """(loss, clipped gradients, norm) of one process."""
    loss, grads = reference_step(model, _data(seed), indices, "token")
    norm = float(torch.nn.utils.get_total_norm(list(grads.values())))
    factor = min(1.0, max_norm / (norm + 1e-6))
    return loss, {n: g * factor for n, g in grads.items()}, norm


def _result(engine: Any, plans: CountedPlans, step: Any, seed: int, found: dict[str, Tensor],
            reference: nn.Module, max_norm: float) -> dict[str, Any]:  # fmt: skip
    expected, grads, norm = _reference(seed, reference, step.indices, max_norm)
    error, where = gradient_error(found, {n: g for n, g in grads.items() if n in found})
    return {
        "error": error,
        "where": where,
        "names": sorted(found),
        "all_names": sorted(grads),
        "loss": step.loss,
        "loss_error": abs(step.loss - expected) / abs(expected),
        "norm_error": abs(step.grad_norm - norm) / norm,
        "plans_made": plans.calls,
        "digest": digest(step.plan),
        "data_rank": engine.world.rank,
        "data_ranks": engine.world.size,
    }


def tensor_parallel_case(
    *, seed: int, fsdp: bool = False, max_norm: float = 0.1, plan_ahead: int = 1
) -> dict[str, Any]:
    """2 x 2: data ranks x tensor parallel ranks (innermost), DTensor parameters, one step."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, reference = SplitModel(seed), SplitModel(seed)
    cut: Any = {n: ColwiseParallel() for n in ("q", "k", "v", "up")}
    cut |= {n: RowwiseParallel() for n in ("proj", "down")}
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], cut)
    if fsdp:
        from torch.distributed.fsdp import fully_shard

        for layer in model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    plans = CountedPlans(seed)
    engine = mdcp.initialize(
        model, None, cost=tiny_profile(heads=HEADS // 2, kv_heads=KV_HEADS // 2), plan_fn=plans,
        mesh=mesh, max_grad_norm=max_norm, plan_ahead=plan_ahead, timeout_s=90,
    )  # fmt: skip
    step = next(iter(engine.dataloader(_data(seed), global_batch_size=9, lengths="lengths")))
    for mb in step:
        mb.backward(weighted_loss_sum(model(**mb.inputs), mb.labels, mb.weights))
    step.finish()
    found = {
        n: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        for n, p in model.named_parameters() if p.grad is not None
    }  # fmt: skip
    out = _result(engine, plans, step, seed, found, reference, max_norm)
    engine.close()
    return out


class Stage(nn.Module):
    """One of two pipeline stages of a model; parameters keep their names."""

    def __init__(self, model: SplitModel, first: bool) -> None:
        super().__init__()
        self.first = first
        if first:
            self.embedding = model.embedding
            self.layers = nn.ModuleDict({"0": model.layers[0]})
        else:
            self.layers = nn.ModuleDict({"1": model.layers[1]})
            self.head = model.head

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        if self.first:
            return self.layers["0"](self.embedding(x), position_ids, attention)  # type: ignore[no-any-return]
        return self.head(self.layers["1"](x, position_ids, attention))  # type: ignore[no-any-return]


def pipeline_case(*, seed: int, wrapper: str = "bare", max_norm: float = 0.1) -> dict[str, Any]:
    """2 x 2: pipeline stages x data ranks; activations go forward, gradients back, one step."""
    mesh: DeviceMesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    whole, reference = SplitModel(seed), SplitModel(seed)
    first = mesh["pp"].get_local_rank() == 0
    model: nn.Module = Stage(whole, first)
    if wrapper == "ddp":
        model = nn.parallel.DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    plans = CountedPlans(seed)
    engine = mdcp.initialize(
        model, None, cost=tiny_profile(), plan_fn=plans, mesh=mesh, max_grad_norm=max_norm,
        recompute="auto", timeout_s=90,
    )  # fmt: skip
    engine.wrap_layers(list(engine.driver.module.layers.values()))
    other = planes_of(mesh)[1 if first else 0][engine.world.rank]
    step = next(iter(engine.dataloader(_data(seed), global_batch_size=9, lengths="lengths")))
    for mb in step:
        ids, positions = mb.inputs["input_ids"], mb.inputs["position_ids"]
        boundary = torch.zeros(len(ids), HIDDEN, dtype=torch.float64)
        if first:
            out = model(ids, positions)
            dist.send(out.detach(), other)
            dist.recv(boundary, other)
            mb.backward_output(out, boundary)
        else:
            dist.recv(boundary, other)
            boundary.requires_grad_()
            mb.backward(weighted_loss_sum(model(boundary, positions), mb.labels, mb.weights))
            assert boundary.grad is not None
            dist.send(boundary.grad, other)
    step.finish()
    inner = engine.driver.module
    found = {n: p.grad for n, p in inner.named_parameters() if p.grad is not None}
    out_ = _result(engine, plans, step, seed, found, reference, max_norm)
    engine.close()
    return out_


def first_plane_fails_case() -> dict[str, Any]:
    """The planner of the first plane fails on one data rank: every process is told why."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))

    def fail(request: PlanRequest) -> StepPlan:
        if dist.get_rank() == 1:
            raise RuntimeError("planner crashed")
        plan: StepPlan = plan_maker(None, 0, False)(request)
        return plan

    engine = mdcp.initialize(
        TinyModel(), None, cost=tiny_profile(), plan_fn=fail, mesh=mesh, timeout_s=90
    )
    try:
        next(iter(engine.dataloader(_data(0), global_batch_size=9, lengths="lengths")))
    except Exception as error:
        return {"type": type(error).__name__, "error": str(error)}
    finally:
        engine.close()
    return {"type": "", "error": ""}
