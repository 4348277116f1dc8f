"""Lengths and shapes of a data set, without reading the samples where that can be avoided."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from megatron_dcp.dispatch import Dataset
from megatron_dcp.errors import ConfigError

LengthSource = str | Callable[[int], int] | Sequence[int]


def dataset_lengths(dataset: Dataset, source: Any) -> list[int]:
    """One length per sample.

    source: a list or array of lengths; a function of the sample's index; or a name, looked up as an
    attribute of the data set (a list or a method giving one), as a column, and last in every item
    (which reads the whole data set once).
    """
    lengths = [_integer(i, n) for i, n in enumerate(_values(dataset, source, "lengths"))]
    if len(lengths) != len(dataset):
        raise ConfigError(f"{len(lengths)} lengths given for a data set of {len(dataset)} samples")
    return lengths


def dataset_shapes(
    dataset: Dataset, source: Any, lengths: Sequence[int]
) -> list[tuple[int, int, int]]:
    """(frames, height, width) of every sample, from the same kinds of source as lengths."""
    found = [tuple(int(n) for n in shape) for shape in _values(dataset, source, "shapes")]
    if len(found) != len(lengths):
        raise ConfigError(f"{len(found)} shapes given for a data set of {len(lengths)} samples")
    shapes: list[tuple[int, int, int]] = []
    for i, (shape, length) in enumerate(zip(found, lengths, strict=True)):
        if len(shape) != 3 or min(shape) < 1 or math.prod(shape) != length:
            raise ConfigError(
                f"sample {i} has shape {shape} and length {length}: a shape is (frames, height, "
                "width) in tokens, their product the length"
            )
        shapes.append(shape)
    return shapes


def _values(dataset: Dataset, source: Any, what: str) -> Any:
    if isinstance(source, str):
        return _named(dataset, source, what)
    if source is None:
        raise ConfigError(
            f"{what}=None: pass a list of {what}, a function of the sample's index, or a name"
        )
    if callable(source):
        return [source(i) for i in range(len(dataset))]
    return source


def _named(dataset: Dataset, name: str, what: str) -> Any:
    attribute = getattr(dataset, name, None)
    if attribute is not None:
        return attribute() if callable(attribute) else attribute
    if name in (getattr(dataset, "column_names", None) or ()):
        return dataset[name]  # type: ignore[index]
    if len(dataset) and isinstance(first := dataset[0], dict) and name in first:
        return [dataset[i][name] for i in range(len(dataset))]
    raise ConfigError(
        f"{what}={name!r}: the data set ({type(dataset).__name__}) has no such attribute, column "
        f"or item key; pass a list of {what} or a function of the sample's index"
    )


def _integer(index: int, value: Any) -> int:
    if isinstance(value, (bool, float)) or not isinstance(value, (int, np.integer)):
        try:
            whole = int(value)
        except (TypeError, ValueError):
            whole = -1
        if isinstance(value, bool) or whole != value:
            raise ConfigError(f"length of sample {index} is {value!r}; lengths are integers >= 1")
        return whole
    return int(value)
