"""Where sample lengths come from: text, JSON, NumPy, a Megatron `.idx`, stdin or a generator.

Every reader returns integers >= 1, in file order, or raises ConfigError that names the file, the
entry and what was found. Nothing is skipped: an empty sample is an error that says so.
"""

from __future__ import annotations

import json
import struct
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np

from megatron_dcp.data.generators import generate
from megatron_dcp.errors import ConfigError
from megatron_dcp.plan import Workload
from megatron_dcp.plan.types import MAX_LENGTH

PRESET = "preset:"
_IDX_MAGIC = b"MMIDIDX\x00\x00"
_IDX_HEADER = 9 + 8 + 1 + 8 + 8  # magic, version, dtype code, sequences, documents


def read_workload(source: str, *, samples: int | None = None, seed: int = 0) -> Workload:
    """A Workload from a file, `-` (stdin, one integer per line) or `preset:NAME`.

    samples: how many a preset draws (512 when None), or how many of a file are drawn without
    replacement by `numpy.random.default_rng(seed).choice` (None: the whole file, in order).
    """
    if source.startswith(PRESET):
        drawn = 512 if samples is None else samples
        return generate(source[len(PRESET) :], drawn, seed=seed).workload
    lengths = read_lengths(source)
    if samples is not None:
        if samples < 1 or samples > len(lengths):
            raise ConfigError(
                f"{samples} samples asked, {source!r} holds {len(lengths)}; ask for 1..that many"
            )
        if seed < 0:
            raise ConfigError(f"seed {seed}: found a negative one; use >= 0")
        picked = np.random.default_rng(seed).choice(np.asarray(lengths), samples, replace=False)
        lengths = tuple(int(x) for x in picked)
    return Workload(lengths=lengths)


def read_lengths(source: str | Path) -> tuple[int, ...]:
    """Lengths in tokens from a file by its suffix, or from stdin for `-`."""
    if str(source) == "-":
        try:
            text = "" if sys.stdin is None else sys.stdin.read()
        except UnicodeDecodeError as error:
            raise ConfigError(f"lengths on stdin are not UTF-8 text: {error.reason}") from error
        return _checked(_numbers(text.removeprefix("\ufeff"), "stdin"), "stdin")
    path = Path(source)
    readers: dict[str, Callable[[Path], Sequence[Any]]] = {
        ".txt": lambda p: _numbers(p.read_text(encoding="utf-8-sig"), str(p)),
        ".json": _json,
        ".npy": _npy,
        ".idx": _idx,
    }
    reader = readers.get(path.suffix)
    if reader is None:
        raise ConfigError(
            f"lengths {str(source)!r}: the suffix {path.suffix!r} is not one of "
            f"{', '.join(readers)}; '-' reads stdin, 'preset:NAME' generates"
        )
    try:
        values = reader(path)
    except OSError as error:
        raise ConfigError(f"cannot read lengths {str(path)!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"lengths {str(path)!r} is not UTF-8 text: {error.reason}") from error
    return _checked(values, str(path))


def _numbers(text: str, where: str) -> list[int]:
    out = []
    for i, line in enumerate(text.splitlines(), start=1):
        item = line.strip()
        if not item:
            continue
        try:
            out.append(int(item))
        except ValueError:
            raise ConfigError(
                f"{where}, line {i}: found {item[:40]!r}, expected one integer per line"
            ) from None
    return out


def _json(path: Path) -> Sequence[Any]:
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"lengths {str(path)!r} is not JSON: {error}") from error
    if not isinstance(values, list):
        raise ConfigError(
            f"lengths {str(path)!r}: found a JSON {type(values).__name__}, expected an array"
        )
    return values


def _npy(path: Path) -> Sequence[Any]:
    try:
        # not np.load, which also opens zip archives
        with path.open("rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of headers that Python 2 wrote
            array = np.lib.format.read_array(file, allow_pickle=False)
    except (ValueError, EOFError, MemoryError, OverflowError, TokenError) as error:
        why = str(error).partition("If you trust")[0].strip()  # numpy's advice is to unpickle it
        raise ConfigError(f"lengths {str(path)!r} is not a plain .npy array: {why}") from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        found = f"{array.dtype} of shape {array.shape}"
        raise ConfigError(f"lengths {str(path)!r}: found {found}, expected a 1-D array of integers")
    values: list[Any] = array.tolist()
    return values


def _idx(path: Path) -> Sequence[Any]:
    """Sequence lengths of a Megatron indexed dataset: int32 after a fixed header."""
    with path.open("rb") as file:
        header = file.read(_IDX_HEADER)
        if not header.startswith(_IDX_MAGIC):
            raise ConfigError(
                f"lengths {str(path)!r} is not a Megatron .idx file: "
                f"it starts with {header[:9]!r}, expected {_IDX_MAGIC!r}"
            )
        if len(header) < _IDX_HEADER:
            raise ConfigError(
                f"lengths {str(path)!r} is cut short: {len(header)} bytes, "
                f"the header alone has {_IDX_HEADER}"
            )
        (version,) = struct.unpack_from("<Q", header, 9)
        (count,) = struct.unpack_from("<Q", header, 18)
        if version != 1:
            raise ConfigError(f"lengths {str(path)!r}: .idx version {version}, this reads 1")
        body = file.read(min(4 * count, path.stat().st_size))
    if len(body) != 4 * count:
        raise ConfigError(
            f"lengths {str(path)!r} is cut short: {count} sequences promised, "
            f"{len(body) // 4} found"
        )
    values: list[Any] = np.frombuffer(body, dtype="<i4").tolist()
    return values


def _checked(values: Sequence[Any], where: str) -> tuple[int, ...]:
    if not values:
        raise ConfigError(f"lengths {where}: no sample found; a batch needs at least one")
    for i, v in enumerate(values):
        if not isinstance(v, int) or isinstance(v, bool) or not 1 <= v <= MAX_LENGTH:
            raise ConfigError(
                f"lengths {where}: sample {i} is {v!r}, expected an integer in 1..{MAX_LENGTH} "
                "(drop empty samples first)"
            )
    return tuple(values)
