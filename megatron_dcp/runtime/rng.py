"""Random numbers that belong to the sample, not to the rank.

A number is a function of (seed, site, sample, step, position in the sample, feature) alone: a
counter-based hash (SplitMix64's finaliser, Steele et al. 2014) instead of a generator with state.
So the shards of a sample agree, a plan change changes nothing, and recomputation draws the same.

* `sample_generator(...)`: uniform and normal numbers for the current microbatch: diffusion noise
  per token and feature, timesteps and caption dropout per sample.
* `sample_dropout(seed)`: while it is on, `torch.nn.functional.dropout` (so `nn.Dropout`) on tensors
  whose rows are the microbatch's tokens draws this way, and so does `mdcp.attention(dropout_p=...)`
  on attention probabilities. The site is the number of the call inside the microbatch's forward.
  After `switch_rows` the rows are taken for those of its target.

Dropout of attention probabilities inside a trainer's own fused kernel is not covered.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron_dcp.dist import PlacementContext, current_or_none, current_placement
from megatron_dcp.dist.randomness import (
    dropout_seed,
    dropout_site,
    next_dropout_site,
    set_dropout_site,
    use_dropout_seed,
)
from megatron_dcp.errors import ConfigError
from megatron_dcp.ops import make_rng_key
from megatron_dcp.schemes.grid import Layout, current_layout, grid_rows, set_current_layout


def _signed(value: int) -> int:
    """A 64-bit constant as torch's int64."""
    return value - (1 << 64) if value >> 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MUL1, _MUL2 = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64 (wrapping), elementwise."""
    z = x + _GOLDEN
    z = (z ^ _shift(z, 30)) * _MUL1
    z = (z ^ _shift(z, 27)) * _MUL2
    return z ^ _shift(z, 31)


def _uniform(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Uniform in (0, 1) from 64 hashed bits: (top 53 bits + 0.5) / 2^53, computed in float64."""
    return ((_shift(bits, 11).double() + 0.5) * 2.0**-53).to(dtype)


class SampleGenerator:
    """Numbers for the rows of one microbatch on this rank; see `sample_generator`."""

    def __init__(
        self, context: PlacementContext, seed: int, site: int, layout: Layout = "own"
    ) -> None:
        self.context = context
        self.key = make_rng_key(seed, site, context.step)
        self.samples, self.positions = context.sample_ids, context.position_ids
        if layout != "own":
            rows = grid_rows(layout, placement=context)
            self.samples = context.sample_keys[rows.sample_index]
            self.positions = rows.position_ids

    def _rows(self, stream: int) -> Tensor:
        """Hashed bits of each local row, [t] int64."""
        samples = mix(self.samples ^ _signed(self.key & (2**64 - 1)))
        return mix(mix(samples + self.positions) + stream)

    def _bits(self, features: int, stream: int) -> Tensor:
        rows = self._rows(stream)
        counter = torch.arange(features, device=rows.device)
        return mix(rows[:, None] + counter)

    def uniform(self, features: int, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """[t, features], uniform in (0, 1)."""
        return _uniform(self._bits(features, 0), dtype)

    def normal(self, features: int, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """[t, features], standard normal (Box-Muller, in float64)."""
        first = _uniform(self._bits(features, 0), torch.float64)
        second = _uniform(self._bits(features, 1), torch.float64)
        out = torch.sqrt(-2.0 * torch.log(first)) * torch.cos(2.0 * math.pi * second)
        return out.to(dtype)

    def per_sample(self, count: int = 1, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """[t, count], uniform in (0, 1), equal for all tokens of a sample: timesteps, masks."""
        samples = mix(self.samples ^ _signed(self.key & (2**64 - 1)))
        return self._sample_numbers(samples, count, dtype)

    def of_samples(self, count: int = 1, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """[B, count]: the numbers of `per_sample`, one row per sample of the microbatch."""
        samples = mix(self.context.sample_keys ^ _signed(self.key & (2**64 - 1)))
        return self._sample_numbers(samples, count, dtype)

    @staticmethod
    def _sample_numbers(samples: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        counter = torch.arange(count, device=samples.device)
        return _uniform(mix(mix(samples)[:, None] + counter), dtype)


def sample_generator(
    *, seed: int, site: int = 0, placement: PlacementContext | None = None
) -> SampleGenerator:
    """Random numbers keyed by sample for the current microbatch.

    site: which use this is (noise, timestep, caption dropout ...): other sites, other numbers.
    """
    return SampleGenerator(placement or current_placement(), seed, site)


class _SampleDropout(TorchFunctionMode):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            return self._dropout(*args, **kwargs)
        return func(*args, **kwargs)

    def _dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        context = current_or_none()
        if not training or p == 0.0 or context is None:
            return F.dropout(input, p, training, inplace)
        site = next_dropout_site(context)
        generator = SampleGenerator(context, self.seed, site, current_layout(context))
        rows = generator.positions.shape[0]
        shape = (
            input.shape[1:] if input.shape[0] != rows and input.shape[:1] == (1,) else input.shape
        )
        if not shape or shape[0] != rows:
            raise ConfigError(
                f"sample_dropout: dropout number {site} of the microbatch is on a tensor of shape "
                f"{tuple(input.shape)}; its rows must be the {rows} tokens that this rank holds in "
                f"layout {current_layout(context)!r}"
            )
        features = math.prod(shape[1:])
        keep = (generator.uniform(features, dtype=torch.float64) >= p).view(input.shape)
        return torch.where(keep, input / (1.0 - p), 0.0) if p < 1.0 else input * 0.0


@contextmanager
def sample_dropout(seed: int) -> Iterator[None]:
    """Within it, dropout of the current microbatch is keyed by sample: see the module docstring.

    Wrap the forward of every microbatch: `with mdcp.sample_dropout(seed): loss = ...`. Recomputed
    layers re-enter it by themselves and draw the numbers that they drew first.
    """
    with use_dropout_seed(seed), _SampleDropout(seed):
        yield


def dropout_state() -> tuple[int, int, Layout] | None:
    """(seed, next site, layout) while sample dropout is on; what a recomputed layer needs."""
    context, seed = current_or_none(), dropout_seed()
    if context is None or seed is None:
        return None
    return seed, dropout_site(context), current_layout(context)


@contextmanager
def restored_dropout(state: tuple[int, int, Layout] | None) -> Iterator[None]:
    """Draw again what was drawn from `state` on, and leave the count as it was.

    The layout stays as the layer leaves it: in the first forward the next layer goes on from there.
    """
    context = current_or_none()
    if state is None or context is None:
        yield
        return
    seed, site, layout = state
    after = dropout_site(context)
    set_dropout_site(context, site)
    set_current_layout(context, layout)
    try:
        with sample_dropout(seed):
            yield
    finally:
        set_dropout_site(context, max(after, dropout_site(context)))
