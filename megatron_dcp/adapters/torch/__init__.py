"""Plain PyTorch loops: a bare module, DistributedDataParallel or FSDP2 (`fully_shard`)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron_dcp.config import (
    Normalize,
    Oversize,
    PlannerConfig,
    RuntimeConfig,
    check_calls,
)
from megatron_dcp.cost import CostProfile, resolve
from megatron_dcp.cost.profiling import check_fingerprint
from megatron_dcp.dist import DataWorld, planes_of, stage_group_of
from megatron_dcp.errors import ConfigError
from megatron_dcp.plan import Topology
from megatron_dcp.runtime import Engine
from megatron_dcp.runtime.autocost import auto_profile
from megatron_dcp.runtime.backend import detect, is_deepspeed, unstepped
from megatron_dcp.runtime.engine import node_ranks
from megatron_dcp.runtime.fingerprint import model_fingerprint
from megatron_dcp.runtime.gradients import local_of
from megatron_dcp.runtime.prepare import PlanFn

__all__ = ["initialize"]

log = logging.getLogger("megatron_dcp")


def initialize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    cost: str | CostProfile = "auto",
    force_cost: bool = False,
    memory: str | float = "auto",
    strategy: str = "dcp",
    backend: str | None = None,
    scheduler: Any = None,
    plan_fn: PlanFn | None = None,
    lockstep: str | int = "auto",
    ranks_per_node: int | None = None,
    normalize: Normalize = "token",
    max_grad_norm: float | None = None,
    float32_gradients: bool = True,
    scaler: Any = None,
    ema_decay: float | None = None,
    recompute: Literal["auto", "off"] = "auto",
    oversize: Oversize = "error",
    measure: bool = False,
    plan_ahead: int = 1,
    timeout_s: float | None = None,
    watchdog_s: float | None = None,
    watchdog_dir: str = ".",
    planes: Sequence[Sequence[int]] | None = None,
    mesh: DeviceMesh | None = None,
    data_dims: Sequence[str] | None = None,
    world: DataWorld | None = None,
) -> Engine:
    """An engine for a model. Collective: every rank calls it alike.

    model: a module, or one wrapped in DistributedDataParallel or by `fully_shard`; its attention
    calls `mdcp.attention`. optimizer, scheduler: stepped once per `step.finish()`, which then
    clears the gradients of the whole model; without an optimizer they are left in place. scaler: a
    torch.amp.GradScaler for float16 autocast; a step that overflows on any rank is skipped on all.
    cost: a profile, a preset's name or a profile file. force_cost: use a fitted profile although it
    was measured on another device or model. backend: how the wrapper is driven, default as found
    (see runtime.backend). memory: `auto` takes the profile's budget, a number is GB (1e9 bytes) per
    rank. plan_fn: makes the plan of a PlanRequest instead of `strategy`. lockstep: `auto` takes
    what the wrapper needs. ranks_per_node: default the launcher's LOCAL_WORLD_SIZE, else all ranks.
    mesh: a DeviceMesh over all processes with named dimensions, where TP or PP is in use: samples
    are distributed over data_dims (default those named dp, dp_replicate, dp_shard, cp, data ...),
    and the first plane's plans go to the others. planes: the same as global ranks of each plane.
    The rest: see RuntimeConfig and PlannerConfig.
    """
    check_calls("optimizer", optimizer, ("step", "zero_grad"))
    check_calls("scheduler", scheduler, ("step",))
    planner = PlannerConfig(
        strategy=strategy,
        cost=cost.name if isinstance(cost, CostProfile) else str(cost),
        memory_gb=_gigabytes(memory),
        lockstep=str(lockstep),
        recompute=recompute,
        oversize=oversize,
    )
    runtime = RuntimeConfig(
        normalize=normalize,
        max_grad_norm=max_grad_norm,
        float32_gradients=float32_gradients,
        ema_decay=ema_decay,
        plan_ahead=plan_ahead,
        measure=measure,
        timeout_s=timeout_s,
        watchdog_s=watchdog_s,
        watchdog_dir=watchdog_dir,
    )
    descriptor = detect(model, name=backend)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if mesh is not None:
        planes = planes_of(mesh, data_dims)
    world = world or DataWorld(planes=planes, device=device, timeout_s=timeout_s)
    if not descriptor.reduces:
        world.broadcast_([local_of(x.data) for x in (*model.parameters(), *model.buffers())])
    if cost == "auto":
        node = node_ranks(ranks_per_node, world.size)
        topology = Topology(data_ranks=world.size, ranks_per_node=node)
        profile = auto_profile(model, descriptor, topology)
    else:
        profile = _profile(cost, model, device, force=force_cost)
    engine = Engine(
        model=model,
        scaler=scaler,
        optimizer=optimizer,
        scheduler=scheduler,
        backend=descriptor,
        world=world,
        profile=profile,
        planner=planner,
        runtime=runtime,
        ranks_per_node=ranks_per_node,
        plan_fn=plan_fn,
        stage_group=None if mesh is None else stage_group_of(mesh),
    )
    if world.rank == 0:
        _warn_unstepped(engine)
    return engine


def _warn_unstepped(engine: Engine) -> None:
    """Name trainable parameters that the optimizer will not step."""
    if is_deepspeed(engine.model):  # its own optimizer steps
        return
    left = unstepped(engine.driver.module, engine.optimizer)
    if left:
        log.warning(
            "%d trainable parameters are in no param group of the optimizer: %s%s. Their gradients "
            "count in the clip norm and are cleared with every step. Freeze them "
            "(requires_grad_(False)) or add them; to step several optimizers pass none and step "
            "them after step.finish()",
            len(left), ", ".join(left[:8]), ", ..." if len(left) > 8 else "",
        )  # fmt: skip


def _gigabytes(memory: str | float) -> float | None:
    if memory == "auto":
        return None
    if isinstance(memory, str) or not memory > 0:
        raise ConfigError(f"memory={memory!r}: pass 'auto' or GB (1e9 bytes) per rank, above 0")
    return float(memory)


def _profile(
    cost: str | CostProfile, model: nn.Module, device: torch.device, *, force: bool
) -> CostProfile:
    """Resolve `cost`; a fitted profile must fit this device and model (or be forced)."""
    if not isinstance(cost, (str, CostProfile)):
        raise ConfigError(f"cost={cost!r}: pass 'auto', a preset, a file or a CostProfile")
    profile = resolve(cost) if isinstance(cost, str) else cost
    differing = check_fingerprint(profile, model_fingerprint(model, device), force=force)
    if differing:
        log.warning("cost profile %s forced: %s", profile.name, "; ".join(differing))
    return profile
