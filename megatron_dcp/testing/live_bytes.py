"""Bytes that tensors hold, counted operation by operation: exact on any device, no allocator asked.

`torch.distributed._tools.mem_tracker` follows every storage from its making to its end. Unlike
saved-tensor hooks it also sees what checkpointing keeps outside of autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker

_ACTIVATIONS = ("ACT", "TEMP")


def live_bytes(model: nn.Module, forward: Callable[[], Tensor]) -> tuple[int, int]:
    """(bytes of activations held between forward and backward, their peak over both).

    forward: returns the loss. Gradients are there before, so that they count as such throughout;
    they are dropped at the end.
    """
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    tracker: Any = MemTracker()
    tracker.track_external(model)
    with tracker:
        loss = forward()
        kept = _activations(tracker, "current")
        torch.autograd.backward(loss)
    peak = _activations(tracker, "peak")
    for p in model.parameters():
        p.grad = None
    return kept, peak


def _activations(tracker: Any, moment: str) -> int:
    (by_kind,) = tracker.get_tracker_snapshot(moment).values()
    return sum(
        int(n) for kind, n in by_kind.items() if str(kind).rsplit(".", 1)[-1] in _ACTIVATIONS
    )
