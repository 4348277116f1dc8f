"""The router's load-balancing loss, independent of what shares a microbatch.

Stock Transformers takes it over all tokens of a microbatch, so that its value depends on how
samples are packed and cut. Here it is per sample: the value that the stock function gives for the
sample alone, averaged over the samples of the global batch. A sample cut over several ranks needs
one sum of its routing counts over the block; probabilities stay local, their gradients add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron_dcp.dist import PlacementContext, sum_by_sample, sum_over_block
from megatron_dcp.errors import AdapterError

_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")


def router_settings(config: Any) -> tuple[float, int, int] | None:
    """(coefficient, experts, experts per token) of a model that asks for the loss, else None."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if not getattr(text, "output_router_logits", False):
        return None
    named = (getattr(text, name, None) for name in _COEFFICIENTS)
    coefficient = next((value for value in named if value is not None), None)
    if coefficient is None:
        raise AdapterError(
            f"{type(text).__name__} sets output_router_logits but names no coefficient of the "
            f"auxiliary loss ({', '.join(_COEFFICIENTS)}); set output_router_logits to false to "
            "train without it"
        )
    if not coefficient:
        return None
    experts = next(
        (
            int(getattr(text, name))
            for name in ("num_local_experts", "num_experts", "n_routed_experts")
            if getattr(text, name, None) is not None
        ),
        None,
    )
    if experts is None:
        raise AdapterError(
            f"{type(text).__name__} asks for an auxiliary loss (coefficient {coefficient}) but "
            "names no number of experts (num_local_experts, num_experts, n_routed_experts); set "
            "output_router_logits to false to train without it"
        )
    return float(coefficient), experts, int(text.num_experts_per_tok)


def sample_balance_loss(
    router_logits: Sequence[Tensor], ctx: PlacementContext, *, experts: int, top_k: int
) -> Tensor:
    """This rank's part of the sum over the placement's samples of their balance losses.

    router_logits: one [t, experts] per layer. Summed over the ranks of the block, the parts give
    `sum_j experts * sum_e f_je P_je`, f and P being the routed share and the mean probability of
    expert e over the tokens (and layers) of sample j. Collective over the block.
    """
    device = router_logits[0].device
    n = len(ctx.lengths)
    counts = torch.zeros(n, experts, device=device)
    sums = torch.zeros(n, experts, device=device)
    for logits in router_logits:
        p = torch.softmax(logits, dim=-1).float()
        chosen = torch.topk(p, top_k, dim=-1).indices
        hits = torch.zeros_like(p).scatter_add_(1, chosen, torch.ones_like(p[:, :top_k]))
        counts = counts + sum_by_sample(hits, ctx)
        sums = sums + sum_by_sample(p, ctx)
    counts = sum_over_block(counts.detach(), ctx, "moe")
    tokens = torch.tensor(ctx.lengths, device=device, dtype=torch.float32)
    total = (tokens * len(router_logits)).unsqueeze(1)
    return experts * (counts / total * (sums / total)).sum()


def unsupported_layers(model: nn.Module) -> list[str]:
    """Kinds of layers whose result would depend on the plan: state passed along the sequence."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    kinds = getattr(text, "layer_types", None) or []
    return sorted({k for k in kinds if k not in ("full_attention", "sliding_attention")})
