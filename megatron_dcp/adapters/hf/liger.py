"""Liger's fused linear cross-entropy for token losses, where it is installed and right for them.

Losses are weighted per token after the head, so the kernel must give one loss per token and take
one gradient per token. Liger can since its forward has `token_grad_output`; older ones accept
`reduction="none"` and give wrong weight gradients, so they are not used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor, nn

MODULE = "liger_kernel.ops.fused_linear_cross_entropy"
IGNORE = -100
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


@cache
def liger_kernel() -> tuple[Kernel | None, str]:
    """(losses of (hidden [t, C], weight [V, C], labels [t], bias [V]) -> [t], or None; why)."""
    try:
        module: Any = __import__(MODULE, fromlist=["fused_linear_cross_entropy_forward"])
    except Exception as error:  # its import starts Triton, which fails in ways of its own
        return None, f"`import {MODULE}` failed: {type(error).__name__}: {error}"
    fault = contract_fault(module)
    if fault is not None:
        return None, fault
    function = module.LigerFusedLinearCrossEntropyFunction

    def losses(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> Tensor:
        # ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction
        out: Tensor = function.apply(hidden, weight, labels, bias, None, IGNORE, 0.0, 0.0, "none")[
            0
        ]
        return out

    return losses, "usable"


def contract_fault(module: Any) -> str | None:
    """What the module lacks of what is called, or None."""
    wanted = ["_input", "weight", "target", "bias", "ce_weight", "ignore_index",
              "lse_square_scale", "label_smoothing", "reduction"]  # fmt: skip
    try:
        given = list(
            inspect.signature(module.LigerFusedLinearCrossEntropyFunction.forward).parameters
        )
        per_token = inspect.signature(module.fused_linear_cross_entropy_forward).parameters
    except (AttributeError, ValueError, TypeError) as error:
        return f"looked for LigerFusedLinearCrossEntropyFunction in {MODULE}: {error}"
    if given[1 : 1 + len(wanted)] != wanted:
        return f"looked for arguments {wanted}, found {given[1:]}"
    if "token_grad_output" not in per_token:
        return "it takes no gradient per token (token_grad_output); update liger-kernel"
    return None


def suits(head: nn.Module, hidden: Tensor) -> bool:
    """Whether the kernel can stand in for a head: a plain linear layer on a GPU."""
    return type(head) is nn.Linear and hidden.is_cuda
