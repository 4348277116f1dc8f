"""Whole optimizer steps on every backend, against one process without any plan.

Each case trains a tiny model for a few steps of plain SGD under a new random plan per step and
compares the parameters with a single process that sums token losses sample by sample. Real
packages throughout: DistributedDataParallel, FSDP2, HSDP and DeepSpeed engines.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import megatron_dcp as mdcp
from megatron_dcp.plan import StepPlan
from megatron_dcp.planner import PlanRequest
from megatron_dcp.runtime import Engine
from megatron_dcp.testing.cases.attention import cached_world
from megatron_dcp.testing.cases.gradients import Samples, random_lengths, reference_step, run_step
from megatron_dcp.testing.models import TinyModel
from megatron_dcp.testing.plans import random_plan, tiny_profile

LEARNING_RATE = 0.5


def backend_case(
    *,
    kind: str,
    seed: int,
    steps: int = 2,
    samples: int = 9,
    idle_rank: bool = False,
    masked: float = 0.2,
    max_grad_norm: float | None = None,
) -> dict[str, Any]:
    """Largest parameter difference after `steps` steps under random plans; see `wrap_kind`."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    dtype = torch.float32 if kind.startswith("zero") else torch.float64
    data = Samples(random_lengths(seed, samples * steps), seed, masked=masked)
    model, reference = TinyModel(seed=seed, dtype=dtype), TinyModel(seed=seed, dtype=dtype)
    engine, expected_name = wrap_kind(kind, model, random_plans(seed, idle_rank), max_grad_norm)
    loader = engine.dataloader(data, global_batch_size=samples, lengths="lengths", seed=seed)
    counts: list[int] = []
    dummies = 0
    losses, wanted = [], []
    optimizer = torch.optim.SGD(reference.parameters(), lr=LEARNING_RATE)
    for step in loader:
        counts.append(sum(not mb.closing for mb in step.microbatches))
        dummies += sum(mb.dummy and not mb.closing for mb in step.microbatches)
        losses.append(run_step(engine, step))
        loss, _ = reference_step(reference, data, step.indices, "token")
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(reference.parameters(), max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(loss)
    found = whole_parameters(engine)
    return {
        "error": max(
            float((found[n] - p.detach()).abs().max()) for n, p in reference.named_parameters()
        ),
        "loss_error": max(abs(a - b) for a, b in zip(losses, wanted, strict=True)),
        "losses": losses,
        "backend": engine.backend.name,
        "expected": expected_name,
        "counts": counts,
        "dummies": dummies,
        "lockstep": engine.lockstep,
    }


def random_plans(seed: int, idle_rank: bool) -> Callable[[PlanRequest], StepPlan]:
    """A new random plan for every step."""

    def make(request: PlanRequest) -> StepPlan:
        return random_plan(request, 1000 * seed + request.step, idle_rank=idle_rank)

    return make


def wrap_kind(
    kind: str, model: nn.Module, plan_fn: Any, max_grad_norm: float | None = None
) -> tuple[Engine, str]:
    """An engine over a model wrapped as `kind` says, and the backend name that it must find.

    bare, ddp, fsdp2, fsdp2-root, fsdp2-keep, hsdp, hsdp-keep, zero0..zero3, zero2-coalesced,
    zero2-offload.
    """
    shared: dict[str, Any] = {
        "cost": tiny_profile(), "plan_fn": plan_fn, "world": cached_world(), "plan_ahead": 0,
        "recompute": "auto",
    }  # fmt: skip
    if kind.startswith("zero"):
        config = zero_config(kind, max_grad_norm)
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        import deepspeed

        deepspeed_world()
        zero, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        name = "zero2-coalesced" if kind == "zero2-coalesced" else None
        return mdcp.initialize(zero, backend=name, **shared), name or kind[:5]
    wrapped, expected = _wrap_torch(kind, model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=LEARNING_RATE)
    engine = mdcp.initialize(wrapped, optimizer, max_grad_norm=max_grad_norm, **shared)
    return engine, expected


def _wrap_torch(kind: str, model: nn.Module) -> tuple[nn.Module, str]:
    if kind == "bare":
        return model, "bare"
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model), "ddp"
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    size = dist.get_world_size()
    if kind.startswith("hsdp"):
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (size,))
    keep = kind.endswith("keep")
    if kind != "fsdp2-root":
        for layer in model.layers:  # type: ignore[union-attr]
            fully_shard(layer, mesh=mesh, reshard_after_forward=not keep)
    fully_shard(model, mesh=mesh, reshard_after_forward=not keep)
    return model, "fsdp2-keep" if keep else kind.partition("-")[0]


def zero_config(kind: str, max_grad_norm: float | None = None) -> dict[str, Any]:
    """A DeepSpeed config with everything explicit."""
    zero: dict[str, Any] = {"stage": int(kind[4])}
    if kind.endswith("offload"):
        zero["offload_optimizer"] = {"device": "cpu"}
    if kind.endswith("buckets"):  # many small reductions inside each backward
        zero |= {"reduce_bucket_size": 2000, "allgather_bucket_size": 2000}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": max_grad_norm or 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def skip_shared_memory_op() -> None:
    """DeepSpeed compiles an optional shared-memory all-reduce at first use, a minute or more; its
    collectives are the same without it."""
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def deepspeed_world() -> None:
    """Let DeepSpeed adopt the process group that is there."""
    import deepspeed

    skip_shared_memory_op()
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    os.environ["LOCAL_WORLD_SIZE"] = str(size)
    deepspeed.init_distributed("gloo", verbose=False)


def whole_parameters(engine: Engine) -> dict[str, Tensor]:
    """Every parameter in full, from sharded ones too. Collective."""
    module = engine.driver.module
    if engine.backend.name == "zero3":
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(module.parameters())):
            return {n: p.detach().clone() for n, p in module.named_parameters()}
    return {
        n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for n, p in module.named_parameters()
    }


def config_case(*, stage: int, directory: str, coalesce: bool = False, bf16: bool = False) -> Any:
    """The DeepSpeed adapter from a config file: a whole run, and one saved, reloaded and resumed.

    Returns losses of both, and the largest parameter difference at their ends.
    """
    import json
    from pathlib import Path

    from megatron_dcp.adapters.deepspeed import initialize, load_checkpoint, save_checkpoint

    deepspeed_world()
    data = Samples(random_lengths(4, 24), 4)
    path = Path(directory) / f"ds_config-{dist.get_rank()}.json"
    section = {"lengths": "lengths", "seed": 4, "coalesce": coalesce, "batch_dim": False}
    config = {
        "train_batch_size": 6,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
        "bf16": {"enabled": bf16},
        "megatron_dcp": section,
    }
    path.write_text(json.dumps(config))

    def start() -> tuple[Engine, Any]:
        model = TinyModel(seed=4, dtype=torch.bfloat16 if bf16 else torch.float32)
        made: tuple[Engine, Any] = initialize(
            model=model, model_parameters=model.parameters(), training_data=data, config=path,
            world=cached_world(), cost=tiny_profile(), plan_fn=random_plans(4, False),
        )  # fmt: skip
        return made

    def run(engine: Engine, loader: Any, steps: int) -> list[float]:
        losses = []
        for step in loader:
            losses.append(run_step(engine, step))
            if len(losses) == steps:
                break
        return losses

    engine, loader = start()
    whole = run(engine, loader, 4)
    end = whole_parameters(engine)
    first, first_loader = start()
    losses = run(first, first_loader, 2)
    first_loader.position = 2
    save_checkpoint(first, first_loader, directory, "two")
    second, second_loader = start()
    load_checkpoint(second, second_loader, directory, "two")
    losses += run(second, second_loader, 2)
    found = whole_parameters(second)
    zero: Any = engine.model
    return {
        "whole": whole,
        "resumed": losses,
        "error": max(float((found[n] - p).abs().max()) for n, p in end.items()),
        "backend": engine.backend.name,
        "clipping": zero.gradient_clipping(),
        "rate": [float(x) for x in zero.get_lr()],
    }
