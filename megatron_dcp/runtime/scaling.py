"""Loss scaling for float16: torch.amp.GradScaler, with one decision for all ranks.

The scaled losses are summed over ranks like any other; the scale is divided out after the reduction
and before clipping. Where gradients are sharded, or belong to one plane of TP or PP, each process
sees only its share, so whether anything overflowed is agreed over all processes: a step is skipped
by all or by none.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_dcp.dist import DataWorld
from megatron_dcp.errors import ConfigError
from megatron_dcp.runtime.backend import is_deepspeed, unstepped, unwrap
from megatron_dcp.runtime.gradients import LOW_PRECISION


def usable_scaler(scaler: Any, optimizer: Any, model: nn.Module) -> Any:
    """The scaler, or None where none was given or it is switched off; refuses what cannot work."""
    if scaler is None or not scaler.is_enabled():
        return None
    if optimizer is None:
        raise ConfigError("scaler needs the optimizer: pass it to initialize() as well")
    if is_deepspeed(model):
        raise ConfigError("DeepSpeed scales losses itself: set fp16 in its config, pass no scaler")
    trained = [(n, p.dtype) for n, p in unwrap(model).named_parameters() if p.requires_grad]
    for name, dtype in trained:
        if dtype in LOW_PRECISION:
            raise ConfigError(
                f"scaler: parameter {name} is {str(dtype)[6:]}; keep trained parameters in float32 "
                "and run the model under torch.autocast(..., dtype=torch.float16)"
            )
    if left := unstepped(unwrap(model), optimizer):
        raise ConfigError(
            f"scaler: parameter {left[0]} is in no param group of the optimizer, so its gradient "
            "would stay scaled in the clip norm; add it, or freeze it (requires_grad_(False))"
        )
    return scaler


def unscale(scaler: Any, optimizer: Any, world: DataWorld) -> bool:
    """Divide the scale out of the gradients; whether any rank's overflowed. Collective."""
    scaler.unscale_(optimizer)
    found: list[torch.Tensor] = list(
        scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
    )
    total = torch.zeros((), device=world.device)
    for x in found:
        local: Any = x
        total = total + (local.full_tensor() if hasattr(local, "full_tensor") else local).to(total)
    if world.everyone is not None:
        dist.all_reduce(total, group=world.everyone)
    for x in found:
        x.fill_(float(total > 0))
    return bool(total > 0)
