"""Drivers: run one wrapper through the microbatches of a step, by its public calls only.

A driver is told when a step begins and how many microbatches this rank runs, before each microbatch
whether it is the last, does the backward, and ends the step with every gradient summed over the
data ranks. It never decides what runs: that is the plan's.

Order of calls, each step:  begin(count)  {before(index)  [the user's forward]  backward(loss)} x
count  end(close)  [clip]  step()

Losses arrive as `token sum / global denominator`; `scale` is what the driver multiplies them by, so
that wrappers that average over the data ranks give sums.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_dcp.errors import AdapterError
from megatron_dcp.runtime.backend import Backend, is_deepspeed, trainable, unwrap

# Loads a driver that lives with its trainer: class name in the MRO -> module and class.
_EXTERNAL = {
    "deepspeed.runtime.engine.DeepSpeedEngine": (
        "megatron_dcp.adapters.deepspeed.driver",
        "DeepSpeedDriver",
    ),
}


class Driver:
    """A plain module: gradients stay local until `end`, which sums them over the data ranks.

    group: the data ranks (None: one rank). optimizer: may be None, then `step` is the caller's.
    """

    def __init__(
        self,
        backend: Backend,
        model: nn.Module,
        optimizer: Any = None,
        *,
        group: dist.ProcessGroup | None = None,
        all_reduce: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.backend = backend
        self.model = model
        self.optimizer = optimizer
        self.group = group
        self.size = dist.get_world_size(group) if group is not None else 1
        self._all_reduce = all_reduce
        self.count = 0
        self.index = -1

    @property
    def module(self) -> nn.Module:
        """The user's own module, unwrapped."""
        return unwrap(self.model)

    @property
    def scale(self) -> float:
        """Factor on losses that are `token sum / global denominator`."""
        return float(self.size) if self.backend.averages else 1.0

    @property
    def last(self) -> bool:
        """Whether the current microbatch is this rank's last of the step."""
        return self.index == self.count - 1

    def begin(self, count: int) -> None:
        """A step with `count` microbatches of this rank, dummies included, begins."""
        if count < self.backend.least_microbatches:
            raise AdapterError(
                f"backend {self.backend.name} needs at least {self.backend.least_microbatches} "
                f"microbatch per rank and step, this rank has {count}; run a dummy"
            )
        self.count, self.index = count, -1

    def before(self, index: int) -> None:
        """Microbatch `index` (0-based) is about to run forward."""
        self.index = index

    def backward(self, loss: Tensor) -> None:
        """Backward of `scale * (token sum / denominator)`, already scaled."""
        torch.autograd.backward(loss)

    def end(self, close: Callable[[], Tensor] | None = None) -> None:
        """After the last microbatch: returns with every gradient summed over the data ranks.

        close: runs one dummy forward and returns its loss; needed by backends with
        `closing_dummy`.
        """
        if self.size > 1:
            self._sum_gradients()

    def clip(self, max_norm: float) -> Tensor:
        """Clip by the global norm of the reduced gradients; returns the norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(trainable(self.module), max_norm)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def step(self) -> None:
        """Optimizer step and zero_grad."""
        if self.optimizer is None:
            raise AdapterError(
                "no optimizer was given to initialize(); pass it, or step it yourself"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _sum_gradients(self) -> None:
        """Flat all-reduce, one per dtype; parameters without a gradient count as zero."""
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for p in trainable(self.module):
            by_dtype.setdefault(p.dtype, []).append(p)
        for params in by_dtype.values():
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
            flat = torch.cat([g.reshape(-1) for g in grads])
            if self._all_reduce is not None:
                flat = self._all_reduce(flat)
            else:
                dist.all_reduce(flat, group=self.group)
            for p, part in zip(params, torch.split(flat, [g.numel() for g in grads]), strict=True):
                p.grad = part.view_as(p)


class DDPDriver(Driver):
    """DistributedDataParallel: `no_sync` on all microbatches but the last.

    The forward decides in DDP, so the context stays open from `before` to the end of `backward`.

    DDP would broadcast the module's buffers inside the first forward of a step. A rank may first
    have to meet the ranks of its block, one of which may be in that broadcast: it happens at the
    start of the step instead, where no rank is inside a block.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._context = contextlib.ExitStack()
        self._ddp = next(
            m for m in _wrappers(self.model) if isinstance(m, nn.parallel.DistributedDataParallel)
        )
        self._buffers = list(self._ddp.module.buffers()) if self._ddp.broadcast_buffers else []
        self._ddp.broadcast_buffers = False

    def begin(self, count: int) -> None:
        super().begin(count)
        group = self._ddp.process_group
        source = dist.get_global_rank(group, 0)
        with torch.no_grad():
            for buffer in self._buffers:
                dist.broadcast(buffer, source, group=group)

    def before(self, index: int) -> None:
        super().before(index)
        self._context.close()
        if not self.last:
            self._context.enter_context(self._ddp.no_sync())

    def backward(self, loss: Tensor) -> None:
        try:
            super().backward(loss)
        finally:
            self._context.close()

    def end(self, close: Callable[[], Tensor] | None = None) -> None:
        """Nothing is left: the last backward returned with reduced gradients."""


class FSDP2Driver(Driver):
    """`fully_shard`, resharding: every microbatch gathers parameters and reduces gradients."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        from torch.distributed.fsdp import FSDPModule

        self._roots = _roots(self.model, FSDPModule)
        if self._on_gloo():
            # gloo has no averaging reduction: sum, then divide.
            for module in self._modules():
                module.set_force_sum_reduction_for_comms(True)
        for module in self._modules():
            # Newer torch: a parameter that this rank's tokens left out counts as zero there.
            if hasattr(module, "set_reduce_scatter_unused_params"):
                module.set_reduce_scatter_unused_params(True)

    def _modules(self) -> list[Any]:
        from torch.distributed.fsdp import FSDPModule

        return [m for m in self.model.modules() if isinstance(m, FSDPModule)]

    def _on_gloo(self) -> bool:
        return dist.is_initialized() and "gloo" in str(dist.get_backend(self.group))

    def end(self, close: Callable[[], Tensor] | None = None) -> None:
        """Nothing is left: each backward reduced its own gradients."""


class FSDP2KeepDriver(FSDP2Driver):
    """`fully_shard`, keep: parameters are gathered once per step, gradients reduced once.

    Neither may happen while a rank is inside a block (a rank would wait for one that waits for it):
    parameters are gathered in `begin`, and gradients are reduced in a closing dummy of all ranks.
    """

    def begin(self, count: int) -> None:
        super().begin(count)
        for root in self._roots:
            root.set_reshard_after_forward(False)
            root.set_reshard_after_backward(False)
            root.set_requires_gradient_sync(False)
            root.set_is_last_backward(False)
        for module in self._modules():  # the same order on every rank
            module.unshard()

    def end(self, close: Callable[[], Tensor] | None = None) -> None:
        if close is None:
            raise AdapterError(f"backend {self.backend.name} needs a closing dummy")
        for root in self._roots:
            root.set_reshard_after_backward(True)
            root.set_requires_gradient_sync(True)
            root.set_is_last_backward(True)
        super().backward(close())


def _wrappers(model: nn.Module) -> list[nn.Module]:
    out = [model]
    while isinstance(inner := getattr(out[-1], "_orig_mod", None), nn.Module):
        out.append(inner)
    return out


def _roots(model: nn.Module, kind: type) -> list[Any]:
    """Outermost modules of a kind."""
    if isinstance(model, kind):
        return [model]
    return [root for child in model.children() for root in _roots(child, kind)]


_LOCAL: dict[str, type[Driver]] = {
    "bare": Driver,
    "ddp": DDPDriver,
    "fsdp2": FSDP2Driver,
    "fsdp2-keep": FSDP2KeepDriver,
}


def make_driver(
    backend: Backend,
    model: nn.Module,
    optimizer: Any = None,
    *,
    group: dist.ProcessGroup | None = None,
    all_reduce: Callable[[Tensor], Tensor] | None = None,
) -> Driver:
    """The driver of a backend. `all_reduce` (in place, returns it) counts and paces if given."""
    if is_deepspeed(model):
        from importlib import import_module

        module, name = _EXTERNAL["deepspeed.runtime.engine.DeepSpeedEngine"]
        kind = getattr(import_module(module), name)
    else:
        kind = _LOCAL[backend.name]
    driver: Driver = kind(backend, model, optimizer, group=group, all_reduce=all_reduce)
    return driver
