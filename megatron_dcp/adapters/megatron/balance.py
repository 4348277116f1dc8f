"""The experts' sequence-level balance loss, per sample.

Megatron's `seq_aux_loss` takes every row of a microbatch for a sequence. A planned microbatch is
one row of several samples, or a part of one. Here the loss of a sample is that of the static run
that has the sample alone in a microbatch, weighted by its tokens:

    coefficient * E / (k * T^2) * sum_e count_e * sum_t p_te,  times T (the step divides by tokens)

Counts are summed over the block and the tensor ranks; each rank keeps the probabilities of its own
tokens, so that the gradients of all of them add up. The loss of a sample sees its real tokens, no
padding.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dcp.adapters.megatron.routers import StandIn
from megatron_dcp.adapters.megatron.versions import installed_version
from megatron_dcp.dist import sum_by_sample, sum_over_block

SEQUENCE = "seq_aux_loss"
LOGGED = "seq_load_balancing_loss"  # Megatron's name of it


def version_share(router: Any) -> float:
    """The weight of a balance loss whose tokens lie on several ranks of the TP x CP group.

    Up to 0.18 Megatron multiplies it by the tokens of one rank, from 0.19 on by those of all.
    """
    major, minor = installed_version().split(".")[:2]
    return 1.0 if (int(major), int(minor)) >= (0, 19) else 1.0 / float(router.tp_cp_group.size())


class SampleBalance(StandIn):
    """The sequence-level loss of every sample of the microbatch."""

    kind = SEQUENCE
    method = "_apply_seq_aux_loss"
    parameters = ("probs", "scores_for_aux_loss", "routing_map", "seq_length", "bsz")

    def __init__(self, router: Any, attention: Any) -> None:
        super().__init__(router, attention)
        self.share = version_share(router)

    def __call__(
        self,
        probs: Tensor,
        scores_for_aux_loss: Tensor,
        routing_map: Tensor,
        seq_length: int,
        bsz: int,
        **kwargs: Any,
    ) -> Tensor:
        ctx = self.placement
        if ctx is None:
            out: Tensor = self.stock(
                probs, scores_for_aux_loss, routing_map, seq_length, bsz, **kwargs
            )
            return out
        from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

        router = self.router
        coefficient = float(router.get_aux_loss_coeff(SEQUENCE))
        if ctx.dummy:  # it joins the log: Megatron reduces that over groups that the entry names
            return self.log(probs, coefficient, probs.new_zeros(()), LOGGED)
        start = self.first_row(len(probs))
        counts = sum_by_sample(routing_map.float(), ctx, start).detach()
        counts = sum_over_block(counts, ctx, "moe")
        if router.tp_group.size() > 1:
            dist.all_reduce(counts, group=router.tp_group)
        sums = sum_by_sample(scores_for_aux_loss.float(), ctx, start)
        tokens = torch.tensor(ctx.lengths, device=probs.device, dtype=torch.float32)
        each = (counts * sums).sum(1) / tokens  # times T, divided by T^2
        scale = coefficient * float(router.config.num_moe_experts) / router.topk
        probs = MoEAuxLossAutoScaler.apply(probs, self.share * scale * each.sum())
        shown = (scale * each / tokens).sum()
        return self.log(probs, coefficient, shown, LOGGED)
