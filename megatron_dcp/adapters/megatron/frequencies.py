"""The experts' balance loss over the global batch, with the expert frequencies of the step before.

Megatron's `global_aux_loss` sums expert counts over all data ranks in every forward and averages
over the microbatches that have run so far: its value depends on their order, and ranks with
different microbatches would wait for each other. The counts of a global batch are known after its
last forward, when backwards have long begun. So the loss of a step takes the frequencies of the
previous global batch, which no plan can change:

    coefficient * E / k * sum_e f_e * sum_t p_te,  f_e = count_e / T of the previous step

and the step's division by tokens gives the mean over its tokens. The first step has even
frequencies, f_e = k / E: scores sum to 1 per token, so it has no gradient. Counts are of real
tokens, each once (they are taken where gradients are on: once with recomputation as well), summed
by one collective at the end of the step.

A step that is run again keeps the frequencies that it had.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dcp.adapters.megatron.routers import StandIn
from megatron_dcp.errors import AdapterError
from megatron_dcp.plan import StepPlan

GLOBAL = "global_aux_loss"
LOGGED = "global_load_balancing_loss"  # Megatron's name of it

log = logging.getLogger("megatron_dcp")


class ExpertFrequencies:
    """Tokens per layer and expert, of the step that runs and of the last whole global batch.

    last: [layers][experts], the same on every process; None before the first step. weights
    [layers, experts] float32: E / k * f_e of the previous step.
    """

    def __init__(self) -> None:
        self.last: list[list[int]] | None = None
        self.counts: Tensor | None = None  # int64: exact in any order
        self.weights: Tensor = torch.empty(0)
        self.log_scale = 0.0
        self._step: int | None = None

    def prepare(self, config: Any, device: torch.device) -> None:
        """Make room for a model with this loss; every process calls it or none does."""
        shape = (int(config.num_layers), int(config.num_moe_experts))
        self.counts = torch.zeros(shape, dtype=torch.int64, device=device)
        if dist.get_rank() == 0:
            first = "even" if self.last is None else "from the checkpoint"
            log.warning(
                "%s: expert frequencies of the previous step (for the first step: %s), because "
                "those of a step are known only after its last forward",
                GLOBAL, first,
            )  # fmt: skip

    def begin(self, plan: StepPlan, microbatches: int) -> None:
        """Start a step that trains. microbatches: of a data-parallel rank in the static run."""
        if self.counts is None:
            return
        self.counts.zero_()
        # Megatron's log sums over ranks and divides by these microbatches.
        self.log_scale = microbatches / sum(plan.lengths)
        if plan.step == self._step:
            return  # run again
        self._step = plan.step
        before = torch.zeros_like(self.counts)
        if self.last is not None:
            before = torch.tensor(self.last, device=self.counts.device)
        if before.shape != self.counts.shape:
            raise AdapterError(
                f"{GLOBAL}: the checkpoint has expert counts [layers, experts] of "
                f"{list(before.shape)}, the model has {list(self.counts.shape)}. Resume with the "
                "model that wrote them, or leave the mdcp state of the checkpoint out"
            )
        total = before.sum(1, keepdim=True)
        share = before.double() * before.shape[1] / total.clamp(min=1)
        self.weights = torch.where(total > 0, share, torch.ones_like(share)).float()

    def end(self) -> None:
        """Close the step. Collective over all processes, of every pipeline stage."""
        if self.counts is not None:
            dist.all_reduce(self.counts)
            self.last = self.counts.tolist()


class GlobalBalance(StandIn):
    """The loss over the global batch of the microbatch's tokens."""

    kind = GLOBAL
    method = "_apply_global_aux_loss"
    parameters = ("probs", "scores_for_aux_loss", "routing_map")

    frequencies: ExpertFrequencies

    def __call__(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, **kwargs: Any
    ) -> Tensor:
        ctx = self.placement
        if ctx is None:
            out: Tensor = self.stock(probs, scores_for_aux_loss, routing_map, **kwargs)
            return out
        from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

        whole = self.frequencies
        assert whole.counts is not None
        coefficient = float(self.router.get_aux_loss_coeff(GLOBAL))
        if ctx.dummy:  # it joins the log: Megatron reduces that over groups that the entry names
            return self.log(probs, coefficient, probs.new_zeros(()), LOGGED, over_data=True)
        rows, layer = self.real_rows(ctx, len(probs)), int(self.router.layer_number) - 1
        whole.counts[layer] += routing_map[:rows].sum(0)
        loss = (scores_for_aux_loss[:rows].float() * whole.weights[layer]).sum() * coefficient
        probs = MoEAuxLossAutoScaler.apply(probs, loss)
        return self.log(probs, coefficient, loss * whole.log_scale, LOGGED, over_data=True)
