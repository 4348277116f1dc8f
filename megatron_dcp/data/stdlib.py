"""Real text of really varying length that every machine has: the running standard library.

Every top-level function or class of the interpreter's standard library is one sample; tokens are
its UTF-8 bytes. The lengths have the long tail of web text: a median of a few hundred tokens, the
longest over 100,000. Test packages and the editor (idlelib) are left out.

Keeps the whole text in memory (8 MB). Does not tokenise, shuffle or cache on disk.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron_dcp.errors import ConfigError

_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "idle_test",
                      "__pycache__"})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCorpus:
    """Samples as bytes. clipped: how many were cut to max_length; cut_tokens: tokens cut away."""

    name: str
    samples: tuple[bytes, ...]
    clipped: int = 0
    cut_tokens: int = 0

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        """Tokens of one sample, int64 [length]."""
        return np.frombuffer(self.samples[index], dtype=np.uint8).astype(np.int64)

    @property
    def lengths(self) -> list[int]:
        """Tokens per sample."""
        return [len(s) for s in self.samples]

    def clip(self, max_length: int) -> TextCorpus:
        """A copy whose samples hold at most max_length tokens, with what was cut counted."""
        if max_length < 1:
            raise ConfigError(f"max_length is {max_length}; it must be at least 1")
        long = [len(s) for s in self.samples if len(s) > max_length]
        return TextCorpus(
            name=self.name,
            samples=tuple(s[:max_length] for s in self.samples),
            clipped=len(long),
            cut_tokens=sum(long) - max_length * len(long),
        )


def stdlib_corpus(root: Path | None = None) -> TextCorpus:
    """Every top-level definition of the standard library below `root`, in path order."""
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    samples: list[bytes] = []
    with _no_collection():
        for path in sorted(_sources(root)):
            samples += _definitions(path)
    if not samples:
        raise ConfigError(
            f"no Python source below {root}: this interpreter has no readable standard library; "
            "run with one that ships its .py files"
        )
    return TextCorpus(name="stdlib", samples=tuple(samples))


def _sources(root: Path) -> Iterator[Path]:
    """Python files below `root`; folders that are left out are not entered: site-packages alone
    may hold ten times as many files."""
    for folder, below, files in os.walk(root):
        below[:] = [name for name in below if name not in _SKIPPED]
        yield from (Path(folder, name) for name in files if name.endswith(".py"))


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """No cyclic garbage collection: a syntax tree is millions of objects in no cycle, which the
    collector would visit again and again (a quarter of the time)."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _definitions(path: Path) -> list[bytes]:
    """Source of each top-level function and class with its decorators; [] for a file that this
    interpreter cannot parse (the library ships some on purpose)."""
    source = path.read_bytes()
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    lines = source.splitlines(keepends=True)
    found = []
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
            found.append(b"".join(lines[first : node.end_lineno]).rstrip(b"\r\n"))
    return [text for text in found if text]
