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
from megatron_dcp.runtime.backend import Backend, is_deepspeed, reshard, trainable, unwrap
from megatron_dcp.runtime.gradients import (
    AllReduce,
    Float32Gradients,
    clip_gradients,
    needs_float32,
    sum_gradients,
)

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
        self.reduce_at_end = False  # ask wrappers that reduce in the last backward not to
        self.never_in_backward = False  # the same, for good
        self.low: Float32Gradients | None = None

    def keep_float32(self) -> None:
        """Accumulate and reduce gradients of low-precision parameters in float32, from now on."""
        params = trainable(self.module)
        if needs_float32(params):
            self.low = Float32Gradients(params)

    @property
    def module(self) -> nn.Module:
        """The user's own module, unwrapped."""
        return unwrap(self.model)

    @property
    def scale(self) -> float:
        """Factor on losses that are `token sum / global denominator`."""
        return float(self.size) if self.averages else 1.0

    @property
    def averages(self) -> bool:
        """Whether the wrapper divides the gradients by the number of ranks, as it is driven now."""
        return self.backend.averages

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
            sum_gradients(trainable(self.module), self._sum, self.low)

    def _sum(self, flat: Tensor) -> Tensor:
        if self._all_reduce is not None:
            return self._all_reduce(flat)
        dist.all_reduce(flat, group=self.group)
        return flat

    def drop(self) -> None:
        """Forget the gradients of a step, float32 sums included."""
        for p in self.module.parameters():
            p.grad = None
        if self.low is not None:
            self.low.sums.clear()

    def clip(self, max_norm: float, sum_squares: AllReduce | None = None) -> Tensor:
        """Clip by the global norm of the reduced gradients; returns the norm before clipping.

        sum_squares: adds up squared norms over ranks that hold other parameters.
        """
        held = [] if self.low is None else list(self.low.sums.values())
        grads = held + [p.grad for p in trainable(self.module) if p.grad is not None]
        return clip_gradients(grads, max_norm, sum_squares)

    def settle(self) -> None:
        """Gradients are final: leave them where optimizers look for them."""
        if self.low is not None:
            self.low.hand_over()

    def step(self) -> None:
        """Optimizer step, then no gradients."""
        if self.optimizer is None:
            raise AdapterError(
                "no optimizer was given to initialize(); pass it, or step it yourself"
            )
        self.optimizer.step()
        self.clear()

    def clear(self) -> None:
        """Forget gradients where an optimizer was given, its own and all others of the model.

        What is in none of its param groups would be reduced once more with the next step.
        """
        self.optimizer.zero_grad(set_to_none=True)
        self.drop()


class DDPDriver(Driver):
    """DistributedDataParallel: `no_sync` on all microbatches but the last.

    The forward decides in DDP, so the context stays open from `before` to the end of `backward`.

    With `reduce_at_end` it reduces like a plain module, after all microbatches: a reduction in the
    last backward cannot be taken back.

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
        if not self.last or self._at_end:
            self._context.enter_context(self._ddp.no_sync())

    def backward(self, loss: Tensor) -> None:
        try:
            super().backward(loss)
        finally:
            self._context.close()

    def end(self, close: Callable[[], Tensor] | None = None) -> None:
        """Nothing is left where the last backward returned with reduced gradients."""
        if self._at_end:
            super().end(close)

    @property
    def _at_end(self) -> bool:
        """DDP's buckets have the type of the parameters: float32 sums are reduced by us."""
        return self.reduce_at_end or self.never_in_backward or self.low is not None

    @property
    def averages(self) -> bool:
        return not self._at_end

    def drop(self) -> None:
        self._context.close()
        super().drop()


class FSDP2Driver(Driver):
    """`fully_shard`, resharding: every microbatch gathers parameters and reduces gradients."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        from torch.distributed.fsdp import FSDPModule

        self._roots = _roots(self.model, FSDPModule)
        reshard(self.model)  # an evaluation before may have left whole parameters in their place
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


class HybridDriver(FSDP2Driver):
    """`fully_shard` over a mesh of (replicate, shard): every microbatch gathers and reduces inside
    its domain; a closing dummy of all ranks adds the domains up.
    """

    def begin(self, count: int) -> None:
        super().begin(count)
        for root in self._roots:
            root.set_requires_all_reduce(False)

    def end(self, close: Callable[[], Tensor] | None = None) -> None:
        if close is None:
            raise AdapterError(f"backend {self.backend.name} needs a closing dummy")
        for root in self._roots:
            root.set_requires_all_reduce(True)
        super().backward(close())


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
    "hsdp": HybridDriver,
}


def make_driver(
    backend: Backend,
    model: nn.Module,
    optimizer: Any = None,
    *,
    group: dist.ProcessGroup | None = None,
    all_reduce: Callable[[Tensor], Tensor] | None = None,
    float32_gradients: bool = False,
) -> Driver:
    """The driver of a backend. `all_reduce` (in place, returns it) counts and paces if given.

    float32_gradients: keep those of low-precision parameters in float32 until the optimizer gets
    them, where the wrapper does not own them (FSDP2: `MixedPrecisionPolicy(reduce_dtype)`).
    """
    if is_deepspeed(model):
        from importlib import import_module

        module, name = _EXTERNAL["deepspeed.runtime.engine.DeepSpeedEngine"]
        kind = getattr(import_module(module), name)
    else:
        kind = _LOCAL[backend.name]
    driver: Driver = kind(backend, model, optimizer, group=group, all_reduce=all_reduce)
    if float32_gradients and backend.name in ("bare", "ddp"):
        driver.keep_float32()
    return driver
