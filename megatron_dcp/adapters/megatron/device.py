"""The device that Megatron will run on: a GPU as it is, or the CPU with stand-ins on request."""

from __future__ import annotations

import torch

from megatron_dcp.adapters.megatron import standins
from megatron_dcp.errors import AdapterError


def prepare_device(*, allow_cpu: bool) -> standins.Installed | None:
    """Install the stand-ins where no GPU is found and the user agreed; None on a GPU."""
    if torch.cuda.is_available():
        return None
    if not allow_cpu:
        raise AdapterError(
            "Megatron: looked for a CUDA device, found none (torch.cuda.is_available() is False). "
            "Run on a GPU machine, or pass --allow-cpu to train on CPU with stand-ins"
        )
    return standins.install()
