"""Data sets that can only be iterated, and lengths that have to be measured."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import megatron_dcp as mdcp
from megatron_dcp.errors import ConfigError
from megatron_dcp.runtime.stream import EndOfData, Stream, StreamConfig, StreamSampler
from megatron_dcp.testing.cases.gradients import Samples, random_lengths, run_step
from megatron_dcp.testing.models import TinyModel
from megatron_dcp.testing.plans import tiny_profile
from megatron_dcp.testing.pool import WorkerPool

CASE = "megatron_dcp.testing.cases.streams"


def sampler(size: int, **options: Any) -> tuple[StreamSampler, Stream]:
    stream = Stream([[i] * (1 + i % 5) for i in range(size)], len)
    return StreamSampler(StreamConfig(**options), stream), stream


@pytest.mark.parametrize(("batch", "window"), [(4, 16), (5, 7), (3, 2), (8, 100)])
def test_every_sample_comes_once_and_near_its_place(batch: int, window: int) -> None:
    own, _ = sampler(50, batch=batch, window=window, remainder="short")
    steps = -(-50 // batch)
    drawn = [n for step in range(steps) for n in own.indices(step)]
    with pytest.raises(EndOfData):
        own.indices(steps)
    assert sorted(drawn) == list(range(50))
    assert all(abs(place - number) < window for place, number in enumerate(drawn))
    assert drawn != sorted(drawn)


def test_a_remainder_is_dropped_unless_asked_for() -> None:
    own, _ = sampler(10, batch=4, window=8)
    assert len(own.indices(1)) == 4
    with pytest.raises(EndOfData, match="10 samples"):
        own.indices(2)


def test_a_step_is_a_function_of_its_number() -> None:
    first, _ = sampler(60, batch=4, window=12, seed=3)
    steps = [first.indices(k) for k in range(10)]
    late, stream = sampler(60, batch=4, window=12, seed=3)
    stream.start(late.first_needed(7))
    assert [late.indices(k) for k in (7, 8, 9)] == steps[7:]
    other, _ = sampler(60, batch=4, window=12, seed=4)
    assert other.indices(0) != steps[0]


class Counted:
    """An endless stream of samples that counts what was read, and can skip as Hugging Face's do."""

    def __init__(self, first: int = 0) -> None:
        self.first, self.read = first, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number in itertools.count(self.first):
            self.read += 1
            g = torch.Generator().manual_seed(number)
            n = 1 + int(torch.randint(0, 30, (1,), generator=g))
            yield {"input_ids": torch.randint(0, 64, (n,), generator=g)}


def test_the_look_ahead_is_bounded_and_what_is_used_is_let_go() -> None:
    source = Counted()
    engine = mdcp.initialize(TinyModel(), None, cost=tiny_profile(), plan_ahead=2)
    loader = engine.dataloader(source, global_batch_size=4, window=12, steps=20)
    held = []
    for step in loader:
        run_step(engine, step)
        held.append(loader.preparer.dataset.held)
        # At most the window in which the furthest planned step ends.
        assert source.read <= (4 * (step.index + 5) // 12 + 1) * 12
    assert max(held) <= 3 * 12
    assert len(loader) == 20


def test_a_resumed_stream_goes_on_exactly_and_skips_what_was_used() -> None:
    def losses(position: int, source: Any) -> list[float]:
        model = TinyModel(seed=0)
        engine = mdcp.initialize(model, None, cost=tiny_profile(), plan_ahead=1)
        loader = engine.dataloader(source, global_batch_size=4, window=12, steps=10, seed=2)
        loader.load_state_dict({"position": position, "sampler": loader.sampler.state()})
        return [run_step(engine, step) for step in loader]

    whole = losses(0, Counted())
    begun: list[int] = []

    def from_item(number: int) -> Counted:
        begun.append(number)
        return Counted(number)

    assert losses(7, from_item) == whole[7:]
    assert begun == [24], "the window in which step 7 begins"
    engine = mdcp.initialize(TinyModel(), None, cost=tiny_profile())
    loaders = [
        engine.dataloader(Counted(), global_batch_size=4, window=w, steps=1, seed=2)
        for w in (12, 8)
    ]
    with pytest.raises(ConfigError, match="window was 12, is 8"):
        loaders[1].load_state_dict(loaders[0].state_dict())


@pytest.mark.parametrize("ranks", [1, 3])
def test_streams_give_all_ranks_the_same_steps_until_the_end(pool: WorkerPool, ranks: int) -> None:
    alone = pool.run(1, f"{CASE}:stream_case", size=22)[0]
    assert len(alone["samples"]) == 5
    for r in pool.run(ranks, f"{CASE}:stream_case", size=22):
        assert r["samples"] == alone["samples"]
        assert r["losses"] == pytest.approx(alone["losses"], rel=1e-12)


def test_a_stream_that_ends_on_one_rank_alone_is_named(pool: WorkerPool) -> None:
    for r in pool.run(2, f"{CASE}:stream_case", size=22, short_rank=1):
        assert r["type"] == "AgreementError"
        assert "the stream of 10 samples ends before step 2" in r["error"]
        assert len(r["samples"]) == 2


def test_lengths_are_measured_once_by_all_ranks_together(pool: WorkerPool, tmp_path: Path) -> None:
    path = str(tmp_path / "deep" / "lengths.npz")
    first = pool.run(2, f"{CASE}:measured_case", cache=path, size=9)
    again = pool.run(2, f"{CASE}:measured_case", cache=path, size=9)
    assert first[0]["lengths"] == first[1]["lengths"] == random_lengths(0, 9)
    assert sorted(first[0]["read"] + first[1]["read"]) == list(range(9))
    assert [r["read"] for r in again] == [[], []]
    assert again[0]["lengths"] == first[0]["lengths"]
    for r in pool.run(2, f"{CASE}:measured_case", cache=path, size=8):
        assert "is of 9 samples" in r["error"]


def test_a_damaged_length_file_is_refused_by_name(tmp_path: Path) -> None:
    engine = mdcp.initialize(TinyModel(), None, cost=tiny_profile())
    data, path = Samples([3, 4, 5, 6], 0), tmp_path / "lengths.npz"

    def make() -> Any:
        return engine.dataloader(data, global_batch_size=2, lengths="input_ids", lengths_cache=path)

    assert make().preparer.lengths == [3, 4, 5, 6]
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ConfigError, match=r"lengths\.npz.*remove it"):
        make()
    np.savez(path, other=np.zeros(3))
    with pytest.raises(ConfigError, match=r"lengths\.npz.*remove it"):
        make()


@pytest.mark.parametrize(
    ("options", "text"),
    [({"window": 0}, "at least 1"), ({"epochs": 2}, "one epoch"), ({"shapes": "s"}, "no shapes")],
)
def test_what_a_stream_cannot_do_is_refused(options: dict[str, Any], text: str) -> None:
    engine = mdcp.initialize(TinyModel(), None, cost=tiny_profile())
    with pytest.raises(ConfigError, match=text):
        engine.dataloader(Counted(), global_batch_size=2, **options)
