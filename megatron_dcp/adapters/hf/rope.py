"""RoPE whose frequencies depend on the sequence length (dynamic NTK, LongRoPE), per sample.

Stock Transformers takes the length from the largest position it is given. On a shard that is too
small, in a pack it is the longest sample's, and the module remembers lengths of earlier calls, so
that the result would depend on the plan and on history. Here every sample gets the frequencies of
its own whole length, as if it had been run alone by a fresh model; so does every document of a
sample that holds several.

Plain, linear, YaRN and Llama-3 RoPE depend on positions alone and need nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from megatron_dcp.dist import PlacementContext, current_or_none

_LENGTH_DEPENDENT = ("dynamic", "longrope")


def rope_types(module: nn.Module) -> list[str]:
    """RoPE types of a rotary embedding; empty for any other module."""
    if not hasattr(module, "rope_type") or not hasattr(module, "max_seq_len_cached"):
        return []
    found = module.rope_type
    return [str(t) for t in found.values()] if isinstance(found, dict) else [str(found)]


def length_dependent(module: nn.Module) -> bool:
    return any(any(name in kind for name in _LENGTH_DEPENDENT) for kind in rope_types(module))


def fix_rotary(model: nn.Module) -> int:
    """Make the length-dependent rotary embeddings of a model per sample; returns how many."""
    fixed = 0
    modules: list[Any] = list(model.modules())
    for module in modules:
        if length_dependent(module) and not hasattr(module, "_mdcp_stock_forward"):
            module._mdcp_stock_forward = module.forward
            module.forward = _PerSample(module, module.forward)
            fixed += 1
    return fixed


def _pieces(ctx: PlacementContext) -> Iterator[tuple[int, int]]:
    """(rows on this rank, whole length) of each sample, or document of it, in the rows' order."""
    for span in ctx.shards.ranks[ctx.block_rank]:
        begin = 0
        documents = None if ctx.documents is None else ctx.documents[span.sample]
        for length in documents or (ctx.lengths[span.sample],):
            rows = min(span.stop, begin + length) - max(span.start, begin)
            if rows > 0:
                yield rows, length
            begin += length


class _PerSample:
    """forward(x [1, t, hidden], position_ids [1, t]) -> cos, sin [1, t, D], sample by sample."""

    def __init__(self, module: nn.Module, stock: Callable[..., Any]) -> None:
        self.module, self.stock = module, stock

    def __call__(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        ctx = current_or_none()
        if ctx is None:
            return self.stock(x, position_ids, *args, **kwargs)
        at = 0
        cos: list[Tensor] = []
        sin: list[Tensor] = []
        for rows, length in _pieces(ctx):
            stop = at + rows
            # One more position, the sample's last, makes the stock code see its whole length.
            last = position_ids.new_tensor([[length - 1]])
            positions = torch.cat([position_ids[:, at:stop], last], dim=1)
            self._forget()
            c, s = self.stock(x, positions, *args, **kwargs)
            cos.append(c[:, :-1])
            sin.append(s[:, :-1])
            at = stop
        self._forget()
        if not cos:
            return self.stock(x, position_ids, *args, **kwargs)
        return torch.cat(cos, dim=1), torch.cat(sin, dim=1)

    def _forget(self) -> None:
        """Back to the state of a fresh module."""
        module: Any = self.module
        names = list(module.rope_type) if isinstance(module.rope_type, dict) else [None]
        for layer_type in names:
            prefix = "" if layer_type is None else f"{layer_type}_"
            original = getattr(module, f"{prefix}original_inv_freq", None)
            if original is None:
                continue
            buffer = getattr(module, f"{prefix}inv_freq")
            # A copy: LongRoPE writes into the buffer in place.
            fresh = original.to(buffer, copy=True)
            module.register_buffer(f"{prefix}inv_freq", fresh, persistent=False)
            setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
