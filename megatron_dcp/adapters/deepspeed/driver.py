"""Drives a DeepSpeed engine through a step: ZeRO stage 0, 1, 2 or 3, by public calls only.

What each stage needs (DeepSpeed 0.19):

* 0: `set_gradient_accumulation_boundary(last)`; the reduction is one blocking call at the end of
  the last backward, when this rank has left its last block.
* 1 and coalesced 2: every backward inside `coalesce_grad_reduction()`. With the boundary alone,
  stage 1 would reduce bucket by bucket *inside* the last backward, blocking a rank that others wait
  for in a block; stage 1 holds whole gradients anyway, so that coalescing costs it nothing.
* 2 and 3 in aligned rounds: a reduction in every backward, the boundary set on the last.

`engine.backward` at accumulation 1 without any of these reduces after each call and keeps only the
last call's gradients on stages 1 and 2: wrong, and silently so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_dcp.errors import AdapterError
from megatron_dcp.runtime.backend import Backend, trainable
from megatron_dcp.runtime.driver import Driver
from megatron_dcp.runtime.gradients import AllReduce


class DeepSpeedDriver(Driver):
    """model: the DeepSpeed engine; its optimizer and scheduler are stepped by `engine.step()`."""

    def __init__(self, backend: Backend, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        super().__init__(backend, model, model.optimizer, **kwargs)
        self.engine: Any = model
        self._check(model)
        self._coalesces = backend.name in ("zero1", "zero2-coalesced") and hasattr(
            model.optimizer, "_coalesce_grad_reduction"
        )
        if backend.name == "zero2-coalesced" and not self._coalesces:
            raise AdapterError(
                f"coalesced ZeRO-2 was asked, but DeepSpeed {_version()} with optimizer "
                f"{type(model.optimizer).__name__} has no coalesce_grad_reduction; use the default "
                "(`coalesce: false`), which runs in aligned rounds"
            )
        self._context = contextlib.ExitStack()

    @staticmethod
    def _check(engine: Any) -> None:
        steps = int(engine.gradient_accumulation_steps())
        if steps != 1:
            raise AdapterError(
                f"gradient_accumulation_steps is {steps} in the DeepSpeed config; set it to 1: the "
                "plan decides how many microbatches each rank accumulates"
            )
        if not engine.managed_gradient_accumulation():
            raise AdapterError(
                "managed_gradient_accumulation is false in the DeepSpeed config; leave it at its "
                "default (true): the boundary is set by megatron-dcp"
            )

    def begin(self, count: int) -> None:
        super().begin(count)
        if self._coalesces:
            self._context.enter_context(self.engine.coalesce_grad_reduction())

    def before(self, index: int) -> None:
        super().before(index)
        self.engine.set_gradient_accumulation_boundary(self._coalesces or self.last)

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss, scale_wrt_gas=False)

    def end(self, close: Callable[[], Tensor] | None = None) -> None:
        """Flushes the coalesced reduction; the other forms reduced in their backwards.

        A parameter that this rank's tokens left out counts as zero: ranks must reduce alike.
        """
        if self._coalesces:
            for p in trainable(self.module):
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
        self._context.close()

    def clip(self, max_norm: float, sum_squares: AllReduce | None = None) -> Tensor:
        raise AdapterError(
            "DeepSpeed clips inside engine.step(): set `gradient_clipping` in its config "
            f"(found {self.engine.gradient_clipping()}) instead of calling clip({max_norm})"
        )

    def step(self) -> None:
        """Clips (as its config says), updates, steps the scheduler and clears gradients."""
        self.engine.step()


def _version() -> str:
    import deepspeed

    return str(deepspeed.__version__)
