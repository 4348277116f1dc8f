"""Token losses without the logits of all tokens at once.

For a vocabulary of 150,000 and a pack of 32,000 tokens the logits alone are 19 GB in fp32. The
causal-LM head is therefore replaced, for a microbatch, by one that returns the loss of every token:
chunk by chunk, each chunk's logits made again in backward. The head still runs inside the model's
forward, where FSDP2 and ZeRO-3 have its weight gathered. On a GPU Liger's fused kernel is used
where it is installed (see `adapters.hf.liger`).

Labels and weights belong to the microbatch (already shifted): see `megatron_dcp.dispatch`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_dcp.adapters.hf.liger import IGNORE, liger_kernel, suits
from megatron_dcp.errors import AdapterError

_CHUNK_TOKENS = 1024


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of each row: logits [t, V], labels [t] -> [t], 0 where the label is ignored."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return nn.functional.cross_entropy(wide, labels, ignore_index=IGNORE, reduction="none")


def chunked_token_losses(
    hidden: Tensor,
    labels: Tensor,
    head: Callable[[Tensor], Tensor],
    *,
    chunk_tokens: int = _CHUNK_TOKENS,
) -> Tensor:
    """`token_losses(head(hidden), labels)` with at most `chunk_tokens` rows of logits alive.

    hidden [t, C], labels [t]; returns [t].
    """
    if hidden.shape[0] <= chunk_tokens:
        return token_losses(head(hidden), labels)

    def one(h: Tensor, y: Tensor) -> Tensor:
        return token_losses(head(h), y)

    parts = [
        checkpoint(one, h, y, use_reentrant=False)
        for h, y in zip(
            torch.split(hidden, chunk_tokens), torch.split(labels, chunk_tokens), strict=True
        )
    ]
    return torch.cat(parts)


class FusedHead:
    """Stands in for the head's forward; gives losses while labels are set, logits otherwise."""

    def __init__(self, head: nn.Module, chunk_tokens: int) -> None:
        self.head, self.stock = head, head.forward
        self.chunk_tokens = chunk_tokens
        self.labels: Tensor | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [1, t, C] -> [1, t, V] logits, or [1, t, 1] losses of the labels set."""
        if self.labels is None:
            logits: Tensor = self.stock(hidden)
            return logits
        labels, rows = self.labels.reshape(-1), hidden.reshape(-1, hidden.shape[-1])
        if suits(self.head, rows) and (kernel := liger_kernel()[0]) is not None:
            head: Any = self.head
            return kernel(rows, head.weight, labels, head.bias).reshape(*hidden.shape[:-1], 1)
        losses = chunked_token_losses(rows, labels, self.stock, chunk_tokens=self.chunk_tokens)
        return losses.reshape(*hidden.shape[:-1], 1)


def fuse_head(model: Any, *, chunk_tokens: int = _CHUNK_TOKENS) -> FusedHead | None:
    """Install the fused head of a causal LM; None where the model works on its logits afterwards.

    Caps and scales on logits (Gemma 2, Cohere, Granite) need whole logits: those models keep their
    stock head.
    """
    config = model.config.get_text_config()
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(config, name, None) not in (None, 1, 1.0):
            return None
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Module):
        raise AdapterError(
            f"{type(model).__name__} has no output embedding; only causal language models have a "
            "token loss here: pass `loss_fn` for other tasks"
        )
    if isinstance(head.forward, FusedHead):
        return head.forward
    fused = FusedHead(head, chunk_tokens)
    head.forward = fused
    return fused
