"""What a fitted cost profile is valid for, as far as a model and its device tell."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def device_name(device: torch.device) -> str:
    """The GPU's name, or the CPU with the threads that torch may use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads"


def model_fingerprint(model: nn.Module, device: torch.device) -> dict[str, Any]:
    """`device`, `parameters` (number of weights, whole tensors where sharded)."""
    return {
        "device": device_name(device),
        "parameters": sum(p.numel() for p in model.parameters()),
    }
