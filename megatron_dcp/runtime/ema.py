"""Exponential moving average of the parameters, in float32, sharded as they are.

`initialize(..., ema_decay=0.999)` keeps one in `engine.ema`; it is updated after every optimizer
step that was taken, and is part of checkpoints. Evaluate with it: `with engine.ema.applied():`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from megatron_dcp.errors import ConfigError
from megatron_dcp.runtime.backend import reshard


class Ema:
    """average <- decay * average + (1 - decay) * parameter, for every trainable parameter."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        if not 0.0 <= decay < 1.0:
            raise ConfigError(f"ema_decay={decay!r} must be at least 0 and below 1")
        self.decay, self._model = decay, model
        self._params = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.average = {n: _wide(p.detach()) for n, p in self._params.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take in the present parameters; once per optimizer step."""
        for name, p in self._params.items():
            self.average[name].lerp_(p.detach().to(self.average[name].dtype), 1.0 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within it the model's parameters are the averages, rounded to their type."""
        before = {n: p.detach().clone() for n, p in self._params.items()}
        try:
            self._copy(self.average)
            yield
        finally:
            self._copy(before)

    @torch.no_grad()
    def _copy(self, values: Mapping[str, Tensor]) -> None:
        reshard(self._model)
        for name, p in self._params.items():
            p.copy_(values[name])

    def full(self) -> dict[str, Tensor]:
        """Whole averages by parameter name. Collective where parameters are sharded."""
        return {
            n: x.full_tensor() if hasattr(x, "full_tensor") else x for n, x in self.average.items()
        }

    @torch.no_grad()
    def load(self, whole: Mapping[str, Tensor]) -> None:
        """Take whole averages, as `full` gives them."""
        if set(whole) != set(self.average):
            raise ConfigError(
                f"the averages are of other parameters: {sorted(set(whole) ^ set(self.average))}"
            )
        for name, own in self.average.items():
            value = whole[name].to(dtype=own.dtype, device=own.device)
            if hasattr(own, "placements"):
                from torch.distributed.tensor import distribute_tensor

                value = distribute_tensor(value, own.device_mesh, own.placements)  # type: ignore[attr-defined]
            own.copy_(value)


def _wide(x: Tensor) -> Tensor:
    """A copy in float32, or float64 where it was that."""
    return x.clone() if x.dtype == torch.float64 else x.to(torch.float32, copy=True)
