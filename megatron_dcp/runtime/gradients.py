"""Gradients that a wrapper leaves to us: accumulated, summed over the data ranks, clipped.

* A parameter that no rank used has no gradient afterwards (None), as in one process: an optimizer
  with weight decay then leaves it alone. One that some rank used gets the sum, zeros counting for
  the others. Which it is travels with the sum: one number more per parameter.
* Gradients of bfloat16 and float16 parameters are accumulated over the microbatches, summed over
  the ranks and clipped in float32, and rounded once, when the optimizer gets them.
* Parameters may be DTensors (tensor parallelism): each rank sums its own shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

AllReduce = Callable[[Tensor], Tensor]
LOW_PRECISION = (torch.bfloat16, torch.float16)  # no types to accumulate gradients in


def needs_float32(params: Sequence[nn.Parameter]) -> bool:
    """Whether any parameter has a type in which gradients should not be accumulated."""
    return any(p.dtype in LOW_PRECISION for p in params)


class Float32Gradients:
    """Moves each gradient of a low-precision parameter into a float32 sum once it is there."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.sums: dict[nn.Parameter, Tensor] = {}
        for p in params:
            if p.dtype in LOW_PRECISION:
                p.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]

    def _take(self, p: Tensor) -> None:
        assert isinstance(p, nn.Parameter)
        assert p.grad is not None
        if p in self.sums:
            self.sums[p] += p.grad
        else:
            self.sums[p] = p.grad.float()
        p.grad = None

    def hand_over(self) -> None:
        """Give the sums to the parameters, rounded to their type."""
        for p, total in self.sums.items():
            p.grad = total.to(p.dtype)
        self.sums.clear()


def local_of(x: Tensor) -> Tensor:
    """This rank's part of a DTensor, or the tensor itself."""
    return x.to_local() if hasattr(x, "to_local") else x


def _placed_like(grad: Tensor, p: Tensor) -> Tensor:
    """A DTensor's gradient in the placement of its parameter (it may be a pending sum)."""
    wanted: Any = getattr(p, "placements", None)
    have: Any = getattr(grad, "placements", None)
    if wanted is None or have == wanted:
        return grad
    placed: Tensor = grad.redistribute(placements=wanted)  # type: ignore[attr-defined]
    return placed


@torch.no_grad()
def sum_gradients(
    params: Sequence[nn.Parameter], all_reduce: AllReduce, low: Float32Gradients | None = None
) -> None:
    """Sum over the data ranks, in place; one flat all-reduce per dtype. Collective."""
    groups: dict[torch.dtype, list[nn.Parameter]] = {}
    for p in params:
        dtype = torch.float32 if low is not None and p.dtype in LOW_PRECISION else p.dtype
        groups.setdefault(dtype, []).append(p)
    for dtype, members in groups.items():
        held = [_held(p, low) for p in members]
        used = torch.tensor(
            [float(g is not None) for g in held], dtype=dtype, device=local_of(members[0]).device
        )
        grads = [
            torch.zeros_like(p, dtype=dtype) if g is None else _placed_like(g, p)
            for g, p in zip(held, members, strict=True)
        ]
        locals_ = [local_of(g) for g in grads]
        flat = all_reduce(torch.cat([*(x.reshape(-1) for x in locals_), used]))
        *parts, counts = torch.split(flat, [*(x.numel() for x in locals_), len(members)])
        anyone = counts.tolist()
        for p, grad, own, part, count in zip(members, grads, locals_, parts, anyone, strict=True):
            if not count:
                _hold(p, None, low)
            elif own is grad:
                _hold(p, part.view_as(grad), low)
            else:
                own.copy_(part.view_as(own))
                _hold(p, grad, low)


def _held(p: nn.Parameter, low: Float32Gradients | None) -> Tensor | None:
    return low.sums.get(p) if low is not None and p.dtype in LOW_PRECISION else p.grad


def _hold(p: nn.Parameter, grad: Tensor | None, low: Float32Gradients | None) -> None:
    if low is None or p.dtype not in LOW_PRECISION:
        p.grad = grad
    elif grad is None:
        low.sums.pop(p, None)
    else:
        low.sums[p] = grad


@torch.no_grad()
def clip_gradients(
    grads: Sequence[Tensor], max_norm: float, sum_squares: AllReduce | None = None
) -> Tensor:
    """Scale gradients so that their global 2-norm is at most max_norm; the norm before, a scalar.

    DTensors count as a whole. sum_squares: adds up squared norms of ranks that hold other
    parameters (pipeline stages). As torch.nn.utils.clip_grad_norm_, the factor is
    max_norm / (norm + 1e-6), at most 1.
    """
    by_mesh: dict[Any, list[Tensor]] = {}
    for g in grads:
        by_mesh.setdefault(getattr(g, "device_mesh", None), []).append(g)
    squares = torch.zeros((), dtype=torch.float32)
    if grads:
        first = local_of(grads[0])
        wide = torch.float64 if first.dtype == torch.float64 else torch.float32
        squares = torch.zeros((), dtype=wide, device=first.device)
    for members in by_mesh.values():
        norm: Any = torch.nn.utils.get_total_norm(members)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        squares = squares + norm.to(squares.dtype) ** 2
    if sum_squares is not None:
        squares = sum_squares(squares)
    total = squares.sqrt()
    factor = float(torch.clamp(max_norm / (total + 1e-6), max=1.0))
    for members in by_mesh.values():
        torch._foreach_mul_(members, factor)
    return total
