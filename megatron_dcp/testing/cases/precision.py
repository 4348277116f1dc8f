"""bfloat16 and float16: how far gradients are from float64, and what a step does with them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import megatron_dcp as mdcp
from megatron_dcp.dist import DataWorld
from megatron_dcp.testing.cases.attention import cached_world
from megatron_dcp.testing.cases.gradients import (
    Samples,
    plan_maker,
    random_lengths,
    reference_step,
    run_step,
    whole,
    wrap,
)
from megatron_dcp.testing.models import TinyModel, dense_causal, weighted_loss_sum
from megatron_dcp.testing.plans import tiny_profile


def norm_errors(found: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, float]:
    """|g - g_ref| / |g_ref| of each tensor, 2-norms."""
    return {n: float((found[n].double() - ref).norm() / ref.norm()) for n, ref in reference.items()}


def autocast_case(*, seed: int, wrapper: str = "bare", samples: int = 9) -> dict[str, Any]:
    """Relative gradient errors under bfloat16 autocast, float32 parameters, one random plan."""
    data = Samples(random_lengths(seed, samples), seed)
    model = TinyModel(seed=seed, dtype=torch.float32)
    reference = TinyModel(seed=seed, dtype=torch.float32).double()
    wrapped = wrap(model, wrapper)
    engine = mdcp.initialize(
        wrapped, None, cost=tiny_profile(), plan_fn=plan_maker(None, seed, False), plan_ahead=0,
        world=cached_world(),
    )  # fmt: skip
    loader = engine.dataloader(data, global_batch_size=samples, lengths="lengths", seed=seed)
    step = next(iter(loader))
    for mb in step:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = wrapped(**mb.inputs)
        mb.backward(weighted_loss_sum(logits.float(), mb.labels, mb.weights))
    loss = step.finish()
    expected, grads = reference_step(reference, data, step.indices, "token")
    found = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    errors = norm_errors(found, grads)
    return {
        "errors": errors,
        "dtypes": sorted({str(g.dtype) for g in found.values()}),
        "loss": loss,
        "loss_error": abs(loss - expected) / abs(expected),
        "recomputed": max((mb.recompute for mb in step.microbatches), default=0),
    }


class Linear(nn.Module):
    """One weight; the gradient of a token's loss is known exactly."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=dtype))

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return (self.weight * input_ids[:, None].to(self.weight.dtype)).sum(1)


def accumulation_case(*, wrapper: str, float32: bool, samples: int = 64) -> dict[str, Any]:
    """Gradients of many microbatches of bfloat16 parameters, each worth 1 but the first, 256."""
    ids = [256] + [1] * (samples - 1)
    data = [{"input_ids": torch.tensor([i]), "labels": torch.tensor([1])} for i in ids]
    model: nn.Module = Linear(torch.bfloat16)
    if wrapper == "ddp" and dist.is_initialized():
        model = DistributedDataParallel(model)
    engine = mdcp.initialize(
        model, None, cost=tiny_profile(), strategy="packed:1", plan_ahead=0, world=cached_world(),
        memory=2.1e-6, float32_gradients=float32, recompute="off",
    )  # fmt: skip
    loader = engine.dataloader(
        data, global_batch_size=samples, lengths=[1] * samples, shuffle=False, shift_labels=False
    )
    step = next(iter(loader))
    for mb in step:
        mb.backward(model(**mb.inputs).float().sum())
    step.finish()
    (weight,) = model.parameters()
    assert weight.grad is not None
    return {
        "gradient": weight.grad.double().tolist(),
        "exact": sum(ids) / samples,
        "microbatches": len(step),
        "dtype": str(weight.grad.dtype),
    }


def dry_run_case(*, wrapper: str, backend: str | None = None, dry: bool) -> dict[str, Any]:
    """The gradient norm of the first step of a bfloat16 model, after a dry run or without one."""
    data = Samples(random_lengths(5, 12), 5)
    model = TinyModel(seed=5, dtype=torch.bfloat16)
    wrapped = wrap(model, wrapper)
    engine = mdcp.initialize(
        wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1), cost=tiny_profile(), plan_ahead=0,
        world=cached_world(), backend=backend, max_grad_norm=1e9,
    )  # fmt: skip
    loader = engine.dataloader(data, global_batch_size=6, lengths="lengths")
    if dry:
        loader.dry_run(
            lambda mb: weighted_loss_sum(wrapped(**mb.inputs).float(), mb.labels, mb.weights)
        )
    step = next(iter(loader))
    run_step(engine, step)
    return {"norm": step.grad_norm, "backend": engine.backend.name}


def unused_case(*, wrapper: str = "bare", idle_rank: bool = False, lockstep: str = "auto") -> Any:
    """Which parameters have gradients where only some samples, or none, use some of them."""
    world = cached_world()

    class Branches(TinyModel):
        """`some` is used by rank 0's tokens alone, `never` by nobody."""

        def __init__(self) -> None:
            super().__init__(seed=0)
            self.some = nn.Parameter(torch.ones(2, dtype=torch.float64))
            self.never = nn.Parameter(torch.ones(2, dtype=torch.float64))

        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            out = super().forward(*args, **kwargs)
            return out * self.some.sum() if world.rank == 0 else out

    data = Samples(random_lengths(0, 8), 0)
    model = Branches()
    wrapped: nn.Module = model
    if wrapper == "ddp":
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2, weight_decay=0.5)
    engine = mdcp.initialize(
        wrapped, optimizer, cost=tiny_profile(), plan_fn=plan_maker(None, 0, idle_rank),
        plan_ahead=0, world=world, lockstep=lockstep,
    )  # fmt: skip
    seen: dict[str, Any] = {}

    def look(*_: Any) -> None:
        seen.update({
            n: None if p.grad is None else float(p.grad.abs().max())
            for n, p in model.named_parameters() if n in ("some", "never")
        })  # fmt: skip

    optimizer.register_step_pre_hook(look)
    run_step(engine, next(iter(engine.dataloader(data, global_batch_size=8, lengths="lengths"))))
    return {"gradients": seen, "never": model.never.tolist()}


def scaler_case(
    *,
    wrapper: str,
    overflow_rank: int | None,
    steps: int = 3,
    planes: list[list[int]] | None = None,
) -> dict[str, Any]:
    """Steps with a GradScaler; in step 1 the gradients of one process overflow."""
    world = cached_world() if planes is None else DataWorld(planes=planes, timeout_s=90)
    data = Samples(random_lengths(1, 24), 1)
    model = TinyModel(seed=1, dtype=torch.float32)
    wrapped = wrap(model, wrapper)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1.0 / (1 + k))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    engine = mdcp.initialize(
        wrapped, optimizer, cost=tiny_profile(), plan_fn=plan_maker("dcp", 1, False),
        plan_ahead=0, world=world, scaler=scaler, scheduler=scheduler, max_grad_norm=0.5,
        ema_decay=0.9,
    )  # fmt: skip
    loader = engine.dataloader(data, global_batch_size=8, lengths="lengths", steps=steps)
    out: dict[str, Any] = {"losses": [], "norms": [], "skipped": [], "scales": [], "moved": []}
    for step in loader:
        before = [whole(p).detach().clone() for p in model.parameters()]
        for mb in step:
            loss = weighted_loss_sum(wrapped(**mb.inputs), mb.labels, mb.weights)
            if step.index == 1 and world.global_ranks[world.rank] == overflow_rank:
                loss.register_hook(lambda g: g * float("inf"))  # type: ignore[no-untyped-call]
            mb.backward(loss)
        out["losses"].append(step.finish())
        out["norms"].append(step.grad_norm)
        out["skipped"].append(step.metrics["skipped"])
        out["scales"].append(scaler.get_scale())
        after = [whole(p).detach() for p in model.parameters()]
        out["moved"].append(any(bool((a != b).any()) for a, b in zip(before, after, strict=True)))
    out["rate"] = scheduler.get_last_lr()[0]
    assert engine.ema is not None
    out["ema"] = [float(x.double().sum()) for x in engine.ema.full().values()]
    out["parameters"] = [float(whole(p.detach()).double().sum()) for p in model.parameters()]
    return out


def evaluation_case(
    *, wrapper: str, backend: str | None = None, evaluate: bool = True, directory: str = ""
) -> dict[str, Any]:
    """Steps with an evaluation before, on the averages and after them; then back to the start.

    directory: an empty one for a checkpoint after the first step, which the last step goes on from.
    """
    from megatron_dcp.runtime.checkpoint import load_checkpoint, save_checkpoint

    data = Samples(random_lengths(4, 24), 4)
    model = TinyModel(seed=4)
    wrapped = wrap(model, wrapper)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.05)
    ids = torch.arange(12)
    out: dict[str, Any] = {"losses": [], "evaluated": []}

    def look() -> None:
        if evaluate:
            with torch.no_grad():
                logits = wrapped(ids, torch.arange(len(ids)), dense_causal)
            out["evaluated"].append(float(logits.square().mean()))

    look()
    engine = mdcp.initialize(
        wrapped, optimizer, cost=tiny_profile(), plan_ahead=0, world=cached_world(),
        backend=backend, ema_decay=0.9,
    )  # fmt: skip
    assert engine.ema is not None
    loader = engine.dataloader(data, global_batch_size=6, lengths="lengths")
    for k in range(3):
        out["losses"].append(run_step(engine, next(iter(loader))))
        if k != 1:
            look()
        with engine.ema.applied():
            look()
        if k != 1:
            look()
        if k == 0:
            save_checkpoint(engine, loader, directory)
    load_checkpoint(engine, loader, directory)
    look()
    out["losses"].append(run_step(engine, next(iter(loader))))
    return out
