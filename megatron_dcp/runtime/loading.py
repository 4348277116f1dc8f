"""From a data set to a loader: its lengths, the sampler that fits it, the preparer of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_dcp.dispatch import ReadOptions
from megatron_dcp.errors import ConfigError
from megatron_dcp.runtime.lengths import dataset_lengths, dataset_shapes, measured_lengths
from megatron_dcp.runtime.loader import StepLoader
from megatron_dcp.runtime.prepare import StepPreparer
from megatron_dcp.runtime.sampler import GlobalSampler, Remainder, SamplerConfig
from megatron_dcp.runtime.stream import (
    Stream,
    StreamConfig,
    StreamLengths,
    StreamSampler,
    item_length,
)

if TYPE_CHECKING:
    from megatron_dcp.runtime.engine import Engine

WINDOW_BATCHES = 16  # a stream's window where none is given


def make_loader(
    engine: Engine,
    dataset: Any,
    *,
    batch: int,
    lengths: Any,
    lengths_cache: str | Path | None,
    shapes: Any,
    steps: int | None,
    epochs: int,
    seed: int,
    shuffle: bool,
    window: int | None,
    remainder: Remainder,
    max_length: int | None,
    shape_quantum: int,
    read: ReadOptions,
    batch_dim: bool,
) -> StepLoader:
    """See `Engine.dataloader`."""
    if shape_quantum and shapes is not None:
        raise ConfigError("shape_quantum pads samples at their end, which a grid cannot be; use 0")
    if shape_quantum and max_length is not None and max_length % shape_quantum:
        raise ConfigError(
            f"max_length={max_length} is no multiple of shape_quantum={shape_quantum}: padded "
            "samples would be longer than it"
        )
    shared: dict[str, Any] = {
        "world": engine.world,
        "settings": engine.settings,
        "plan_fn": engine.plan_fn,
        "read": read,
        "min_microbatches": engine.backend.least_microbatches,
        "closing_dummy": engine.backend.closing_dummy,
        "weight_dtype": _weight_dtype(engine),
        "max_length": max_length,
        "shape_quantum": shape_quantum,
        "post": engine.post,
    }
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        if shapes is not None or lengths_cache is not None or epochs != 1:
            raise ConfigError(
                "a data set that can only be iterated has no shapes, no lengths_cache and one "
                "epoch here; let the iterable repeat itself, or give one with an index"
            )
        stream = Stream(dataset, partial(item_length, source=lengths, tokens=read.tokens))
        chosen = WINDOW_BATCHES * batch if window is None else window
        config = StreamConfig(
            batch=batch, window=chosen, seed=seed, shuffle=shuffle, remainder=remainder
        )
        streaming = StepPreparer(
            dataset=stream, lengths=StreamLengths(stream), sampler=StreamSampler(config, stream),
            **shared,
        )  # fmt: skip
        return _loader(engine, streaming, steps, batch_dim)
    if window is not None:
        raise ConfigError("window belongs to data sets that can only be iterated; leave it out")
    found = (
        dataset_lengths(dataset, lengths)
        if lengths_cache is None
        else measured_lengths(engine.world, dataset, lengths, lengths_cache)
    )
    _refuse_empty(found)
    grids = None if shapes is None else dataset_shapes(dataset, shapes, found)
    if grids is not None and (max_length is not None or engine.planner.oversize == "truncate"):
        raise ConfigError(
            "samples with shapes cannot be cut to a length: leave max_length out, and use "
            "oversize='error' or 'drop'"
        )
    sampler = GlobalSampler(
        SamplerConfig(size=len(found), batch=batch, seed=seed, shuffle=shuffle, remainder=remainder)
    )
    preparer = StepPreparer(dataset=dataset, lengths=found, sampler=sampler, shapes=grids, **shared)
    total = sampler.config.steps_per_epoch * epochs if steps is None else steps
    return _loader(engine, preparer, total, batch_dim)


def _loader(
    engine: Engine, preparer: StepPreparer, steps: int | None, batch_dim: bool
) -> StepLoader:
    return StepLoader(
        engine, preparer, steps=steps, plan_ahead=engine.runtime.plan_ahead, batch_dim=batch_dim
    )


def _refuse_empty(lengths: Sequence[int]) -> None:
    empty = [i for i, n in enumerate(lengths) if n < 1]
    if empty:
        raise ConfigError(
            f"sample {empty[0]} has length {lengths[empty[0]]} ({len(empty)} samples are empty); "
            "remove them from the data set"
        )


def _weight_dtype(engine: Engine) -> torch.dtype:
    first = next(iter(engine.model.parameters()), None)
    double = first is not None and first.dtype == torch.float64
    return torch.float64 if double else torch.float32
