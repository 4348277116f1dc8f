"""Lengths and shapes of a data set, without reading the samples where that can be avoided."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dcp.dispatch import Dataset
from megatron_dcp.dist import DataWorld, gather_bytes
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


def measured_lengths(
    world: DataWorld, dataset: Dataset, source: Any, cache: str | Path
) -> list[int]:
    """Lengths that have to be measured, once: each rank reads its share of the items, data rank 0
    keeps the result in a file (.npz). Collective.

    source: a function of the sample's index, or the name of a field: an integer, or tokens that are
    counted. A file of another data set (size, fingerprint, source) is refused.
    """
    path = Path(cache)
    key = f"{getattr(dataset, '_fingerprint', '')}/{source if isinstance(source, str) else ''}"
    mine = _cached(path, len(dataset), key) if world.rank == 0 else b""
    problem, _, data = gather_bytes(world, mine)[0].partition(b"\n")
    if problem:
        raise ConfigError(problem.decode())
    if not data:
        share = [
            _integer(i, _measure(dataset, source, i))
            for i in range(world.rank, len(dataset), world.size)
        ]
        parts = gather_bytes(world, np.array(share, dtype=np.int64).tobytes())
        lengths = np.zeros(len(dataset), dtype=np.int64)
        for rank, part in enumerate(parts):
            lengths[rank :: world.size] = np.frombuffer(part, dtype=np.int64)
        if world.rank == 0:
            _keep(path, lengths, key)
        data = lengths.tobytes()
    found: list[int] = np.frombuffer(data, dtype=np.int64).tolist()
    return found


def _measure(dataset: Dataset, source: Any, index: int) -> Any:
    if callable(source):
        return source(index)
    item = dataset[index]
    if not isinstance(item, Mapping):
        return len(item)
    if source not in item:
        raise ConfigError(
            f"lengths={source!r}: item {index} has no such field, only {sorted(item)}; name the "
            "field of its length or of its tokens"
        )
    value = item[source]
    return len(value) if hasattr(value, "__len__") else value


def _cached(path: Path, size: int, key: str) -> bytes:
    """A line break and the cached lengths (none: the break alone), or what is wrong with them."""
    if not path.exists():
        return b"\n"
    try:
        with np.load(path, allow_pickle=False) as file:
            lengths, of = file["lengths"].astype(np.int64), str(file["key"])
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        return (
            f"lengths_cache {path} cannot be read: {error}; remove it to measure again\n".encode()
        )
    if len(lengths) != size or of != key:
        return (
            f"lengths_cache {path} is of {len(lengths)} samples ({of!r}), the data set has "
            f"{size} ({key!r}); remove it to measure again, or name another file\n"
        ).encode()
    data: bytes = lengths.tobytes()
    return b"\n" + data


def _keep(path: Path, lengths: Any, key: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        np.savez(file, lengths=lengths, key=np.array(key))
    part.replace(path)
