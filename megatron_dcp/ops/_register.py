"""Small helpers to register fakes and autograd formulas on the ops that C++ defined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_library: Any = torch.library  # partly untyped


def fake(name: str, function: Callable[..., Any]) -> None:
    """Register the fake (shape and dtype) implementation of `megatron_dcp::name`."""
    _library.register_fake(f"megatron_dcp::{name}", function)


def autograd(
    name: str, backward: Callable[..., Any], setup: Callable[..., None] | None = None
) -> None:
    """Register the gradient of `megatron_dcp::name`."""
    _library.register_autograd(f"megatron_dcp::{name}", backward, setup_context=setup)


def once_differentiable(name: str) -> None:
    """Make backward through `megatron_dcp::name`, itself a gradient, an error: torch would warn and
    leave its part of the second derivative out."""

    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(
            f"megatron_dcp::{name} was asked for a second derivative, which it does not have. Keep "
            "what needs one (gradient penalties, Hessian products) to plain torch, as in "
            "megatron_dcp.ops.reference, or drop create_graph=True"
        )

    autograd(name, backward)
