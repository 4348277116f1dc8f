"""Lengths of a data set, without reading the samples where that can be avoided."""

from __future__ import annotations

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
    size = len(dataset)
    if isinstance(source, str):
        values = _named(dataset, source)
    elif callable(source):
        values = [source(i) for i in range(size)]
    else:
        values = source
    lengths = [_integer(i, n) for i, n in enumerate(values)]
    if len(lengths) != size:
        raise ConfigError(f"{len(lengths)} lengths given for a data set of {size} samples")
    return lengths


def _named(dataset: Dataset, name: str) -> Any:
    attribute = getattr(dataset, name, None)
    if attribute is not None:
        return attribute() if callable(attribute) else attribute
    if name in (getattr(dataset, "column_names", None) or ()):
        return dataset[name]  # type: ignore[index]
    if len(dataset) and isinstance(first := dataset[0], dict) and name in first:
        return [dataset[i][name] for i in range(len(dataset))]
    raise ConfigError(
        f"lengths={name!r}: the data set ({type(dataset).__name__}) has no such attribute, column "
        "or item key; pass a list of lengths or a function of the sample's index"
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
