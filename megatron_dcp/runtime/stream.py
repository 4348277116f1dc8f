"""Data sets that can only be read from front to back, with a bounded look-ahead.

The stream is cut into windows of consecutive samples; each window is shuffled by a permutation of
its own, a function of (seed, window number). So the samples of a step depend on the stream's order,
the window, batch, seed and step number alone, every sample comes exactly once, at most two windows
and the steps planned ahead are in memory, and a resume needs the step number only: the stream is
read again from the first sample of the window in which the step begins.

Every rank reads the whole stream and keeps the tensors of its own samples for its placements: the
lengths of a step must be known everywhere. Where reading is dear, give an index of lengths instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from megatron_dcp.errors import ConfigError, MdcpError

Source = Iterable[Any] | Callable[[int], Iterable[Any]]


class EndOfData(MdcpError):
    """The stream has no more samples for a whole step."""


class Stream:
    """Items by their number in the stream, held until nobody can ask for them any more.

    source: an iterable; with a method `skip(n)` (Hugging Face) a resume does not read what was
    used. Or a function of n that gives the stream from item n on. length: of an item, in tokens.
    Safe to use from two threads.
    """

    def __init__(self, source: Source, length: Callable[[Any], int]) -> None:
        self._source, self._length = source, length
        self._lock = threading.RLock()
        self._items: dict[int, tuple[Any, int]] = {}
        self._iterator: Iterator[Any] | None = None
        self._next = 0  # number of the item that the iterator gives next
        self._first = 0  # items below were given up
        self.size: int | None = None  # of the whole stream, once its end was met

    def start(self, number: int) -> None:
        """Go on from an item; what was held is forgotten."""
        with self._lock:
            self._items.clear()
            self._iterator = iter(_from(self._source, number))
            self._next = self._first = number

    def has(self, number: int) -> bool:
        """Whether there is such an item; reads up to it."""
        with self._lock:
            while self._next <= number and self.size is None:
                self._pull()
            return self.size is None or number < self.size

    def _pull(self) -> None:
        if self._iterator is None:
            self.start(self._first)
        assert self._iterator is not None
        try:
            item = next(self._iterator)
        except StopIteration:
            self.size = self._next
            return
        length = self._length(item)
        if length < 1:
            raise ConfigError(
                f"sample {self._next} of the stream has length {length}; leave empty samples out"
            )
        self._items[self._next] = (item, length)
        self._next += 1

    def _held(self, number: int) -> tuple[Any, int]:
        with self._lock:
            if number < self._first or not self.has(number):
                raise ConfigError(
                    f"sample {number} of the stream asked; held are {self._first}..{self._next - 1}"
                )
            return self._items[number]

    def __getitem__(self, number: int) -> Any:
        return self._held(number)[0]

    def __len__(self) -> int:
        """Items read so far."""
        return self._next

    def length(self, number: int) -> int:
        return self._held(number)[1]

    def forget(self, below: int) -> None:
        """Give up the items below a number."""
        with self._lock:
            for number in range(self._first, min(below, self._next)):
                self._items.pop(number, None)
            self._first = max(self._first, below)

    @property
    def held(self) -> int:
        """Items in memory."""
        return len(self._items)


def _from(source: Any, number: int) -> Iterable[Any]:
    if callable(source):
        return source(number)  # type: ignore[no-any-return]
    if number and hasattr(source, "skip"):
        return source.skip(number)  # type: ignore[no-any-return]
    rest: Iterator[Any] = iter(source)
    for _ in range(number):
        if next(rest, rest) is rest:
            break
    return rest


class StreamLengths(Sequence[int]):
    """The lengths of a stream by number; grows while the stream is read."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __getitem__(self, number: Any) -> Any:
        return self._stream.length(number)

    def __len__(self) -> int:
        return len(self._stream)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig:
    """window: samples that are shuffled among each other, and how far the stream is read ahead.

    remainder: samples at the end that fill no whole batch are left out, or make a short last step.
    """

    batch: int
    window: int
    seed: int = 0
    shuffle: bool = True
    remainder: Literal["drop", "short"] = "drop"

    def __post_init__(self) -> None:
        if self.batch < 1 or self.window < 1:
            raise ConfigError(
                f"batches of {self.batch} from windows of {self.window} samples: both at least 1"
            )
        if self.remainder not in ("drop", "short"):
            raise ConfigError(f"remainder={self.remainder!r}: use 'drop' or 'short'")


class StreamSampler:
    """`indices(step)`: numbers in the stream of a step's samples; EndOfData after the last step."""

    def __init__(self, config: StreamConfig, stream: Stream) -> None:
        self.config, self._stream = config, stream

    def indices(self, step: int) -> list[int]:
        c = self.config
        first = step * c.batch
        found = [n for p in range(first, first + c.batch) if (n := self._at(p)) is not None]
        if not found or (len(found) < c.batch and c.remainder == "drop"):
            raise EndOfData(f"the stream of {self._stream.size} samples ends before step {step}")
        return found

    def _at(self, position: int) -> int | None:
        """The stream number at a position of the shuffled order, or None past the end."""
        window = self.config.window
        begin = position // window * window
        if not self.config.shuffle:
            return position if self._stream.has(position) else None
        self._stream.has(begin + window - 1)
        size = self._stream.size
        count = window if size is None else min(window, max(size - begin, 0))
        if position - begin >= count:
            return None
        return begin + int(self._permutation(begin // window, count)[position - begin])

    def _permutation(self, number: int, count: int) -> Any:
        seed = np.random.SeedSequence([self.config.seed, number])
        return np.random.Generator(np.random.PCG64(seed)).permutation(count)

    def first_needed(self, step: int) -> int:
        """The lowest stream number that this step or a later one may draw."""
        return step * self.config.batch // self.config.window * self.config.window

    def state(self) -> dict[str, Any]:
        """What must be equal for a resume to draw the same samples."""
        c = self.config
        return {
            "stream": True, "batch": c.batch, "window": c.window, "seed": c.seed,
            "shuffle": c.shuffle, "remainder": c.remainder,
        }  # fmt: skip

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a state of another order."""
        from megatron_dcp.runtime.sampler import check_sampler_state

        check_sampler_state(self.state(), state)


def item_length(item: Any, source: Any, tokens: str) -> int:
    """Length of a stream's item: a function of it, a field that holds it, or that of its tokens."""
    if callable(source):
        return int(source(item))
    if isinstance(item, Mapping):
        if source in item:
            return int(item[source])
        if tokens in item:
            return len(item[tokens])
        raise ConfigError(
            f"an item of the stream has neither {source!r} (its length) nor {tokens!r}, only "
            f"{sorted(item)}; pass lengths= a function of the item"
        )
    return len(item)
