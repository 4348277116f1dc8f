"""Forward steps whose losses are not Megatron's per-token one, as scripts have them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor


def loss_func(loss_mask: Tensor, output_tensor: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean over a microbatch and no count, as in the docstring of Megatron's schedules."""
    mask = loss_mask.view(-1).float()
    loss = (output_tensor.view(-1).float() * mask).sum() / mask.sum()
    return loss, {"lm loss": loss.detach()}


def mean_forward(iterator: Iterator[dict[str, Tensor]], model: Any) -> Any:
    item = next(iterator)
    output = model(item["tokens"], item["position_ids"], None, labels=item["labels"])
    return output, partial(loss_func, item["loss_mask"])


def nested_forward(iterator: Iterator[dict[str, Tensor]], model: Any) -> Any:
    """A loss that cannot be seen from outside: twice the language model's."""
    item = next(iterator)
    output = model(item["tokens"], item["position_ids"], None, labels=item["labels"])

    def loss(output_tensor: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        mask = item["loss_mask"].view(-1).float()
        total = 2 * (output_tensor.view(-1).float() * mask).sum()
        return total, mask.sum().int(), {"lm loss": total.detach().view(1)}

    return output, loss
