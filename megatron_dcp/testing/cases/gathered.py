"""How many gathered groups of KV heads `allgather` holds at once."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_dcp.schemes import attention
from megatron_dcp.testing.cases.attention import block_context, cached_world


class _Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts tensors of one shape made by `new_empty`: `made`, and `most` alive at a time."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shape, self._alive = shape, list[weakref.ref[Tensor]]()
        self.made = self.most = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.new_empty.default and tuple(out.shape) == self._shape:
            self._alive = [r for r in self._alive if r() is not None] + [weakref.ref(out)]
            self.made, self.most = self.made + 1, max(self.most, len(self._alive))
        return out


def gathered_case(*, length: int, kv_heads: int, groups: int) -> list[int]:
    """(groups gathered in a forward, most held at a time)."""
    ctx = block_context(cached_world(), [length], "allgather", 1)
    q, k, v = (torch.randn(ctx.tokens, kv_heads, 8) for _ in range(3))
    with torch.no_grad(), _Alive((length, 2, kv_heads // groups, 8)) as alive:
        attention(q, k, v, placement=ctx)
    return [alive.made, alive.most]
