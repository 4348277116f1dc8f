"""The experts' sequence-level balance loss, per sample.

Megatron's `seq_aux_loss` takes every row of a microbatch for a sequence. A planned microbatch is
one row of several samples, or a part of one. Here the loss of a sample is that of the static run
that has the sample alone in a microbatch, weighted by its tokens:

    coefficient * E / (k * T^2) * sum_e count_e * sum_t p_te,  times T (the step divides by tokens)

Counts are summed over the block; each rank keeps the probabilities of its own tokens, so that the
gradients of the block's ranks add up. The loss of a sample sees its real tokens, no padding.

The router is not told the microbatch. It learns it from the attention of its own layer, which runs
before it, in a recomputation too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_dcp.adapters.megatron.patchset import signature_fault
from megatron_dcp.dist import PlacementContext, sum_by_sample, sum_over_block
from megatron_dcp.errors import AdapterError

KIND = "seq_aux_loss"
_ARGUMENTS = ("probs", "scores_for_aux_loss", "routing_map", "seq_length", "bsz")


class SampleBalance:
    """Stands in for `TopKRouter._apply_seq_aux_loss` of one layer."""

    def __init__(self, router: Any, attention: Any) -> None:
        self.router, self.attention = router, attention
        self.stock = router._apply_seq_aux_loss

    def __call__(
        self,
        probs: Tensor,
        scores_for_aux_loss: Tensor,
        routing_map: Tensor,
        seq_length: int,
        bsz: int,
        **kwargs: Any,
    ) -> Tensor:
        ctx: PlacementContext | None = self.attention.mdcp_placement
        if ctx is None:
            out: Tensor = self.stock(
                probs, scores_for_aux_loss, routing_map, seq_length, bsz, **kwargs
            )
            return out
        if ctx.dummy:
            return probs
        from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

        router = self.router
        coefficient = float(router.get_aux_loss_coeff(KIND))
        counts = sum_by_sample(routing_map.float(), ctx).detach()
        counts = sum_over_block(counts, ctx, "moe")
        sums = sum_by_sample(scores_for_aux_loss.float(), ctx)
        tokens = torch.tensor(ctx.lengths, device=probs.device, dtype=torch.float32)
        each = (counts * sums).sum(1) / tokens  # times T, divided by T^2
        scale = coefficient * float(router.config.num_moe_experts) / router.topk
        probs = MoEAuxLossAutoScaler.apply(probs, scale * each.sum())
        # Only the log: no token counts, so no gradient.
        shown: Tensor = router.attach_and_log_load_balancing_loss(
            probs,
            coefficient,
            (scale * each / tokens).sum().detach(),
            "seq_load_balancing_loss",
            router.tp_cp_group,
            valid_token_count=0,
        )
        return shown


def follow_samples(chunk: Any) -> int:
    """Give every router of a model chunk whose sequence-level loss is on the loss per sample.

    Returns how many there are. Raises AdapterError where the router is not as it was tested.
    """
    found = 0
    for layer in chunk.modules():
        router = getattr(getattr(layer, "mlp", None), "router", None)
        attention = getattr(layer, "self_attention", None)
        if router is None or attention is None or not router.get_aux_loss_coeff(KIND):
            continue
        fault = signature_fault(router._apply_seq_aux_loss, _ARGUMENTS)
        if fault or not hasattr(attention, "mdcp_placement"):
            raise AdapterError(
                f"Megatron: {KIND} per sample: "
                + (fault or "looked for a plan-aware self-attention beside the router")
                + ". Set --moe-aux-loss-coeff 0 or use a tested version"
            )
        router._apply_seq_aux_loss = SampleBalance(router, attention)
        found += 1
    return found


def balance_fault(config: Any) -> str | None:
    """Why the loss per sample cannot be taken with a configuration, or None."""
    if config.tensor_model_parallel_size > 1:
        return f"moe_router_load_balancing_type {KIND} with tensor parallelism"
    if "moe" in (getattr(config, "recompute_modules", None) or []):
        return f"moe_router_load_balancing_type {KIND} with recompute_modules moe"
    return None
