"""The loss of one microbatch of a Transformers model, as a sum over local tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from megatron_dcp.adapters.hf.prepare import Prepared, forward_losses, weighted_sum
from megatron_dcp.errors import ConfigError


def microbatch_loss(prepared: Prepared, model: nn.Module, step: Any, mb: Any) -> Tensor:
    """Weighted token losses, and the router's balance loss where the model has one.

    The balance loss counts like the stock one on a batch of single samples: its coefficient times
    the mean over the samples of the step. `mb.backward` divides by the step's token denominator, so
    the sample part is multiplied by it first.
    """
    losses, balance = forward_losses(prepared, model, mb.inputs, mb.labels, mb.context)
    total = weighted_sum(losses, mb.weights.reshape(-1))
    if balance is not None and mb.context.padded:
        raise ConfigError(
            "the router's balance loss counts every token, the padding of shape_quantum too: leave "
            "shape_quantum out of engine.dataloader, or set output_router_logits to false"
        )
    if balance is not None and prepared.router is not None and not mb.dummy:
        samples = len(step.plan.lengths)
        total = total + balance * (prepared.router[0] * step.denominator / samples)
    return total
