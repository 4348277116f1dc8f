"""The scale model of a link: a queue of messages, hidden by whatever runs meanwhile."""

from __future__ import annotations

import time

import pytest

from megatron_dcp.dist import DataWorld, LinkPacer, Wire
from megatron_dcp.dist.wire import naming
from megatron_dcp.errors import ConfigError, TransferError


def test_messages_queue_on_the_link() -> None:
    pacer = LinkPacer(1e6)
    begin = time.perf_counter()
    first, second = pacer.post(20_000), pacer.post(30_000)
    assert second - first == pytest.approx(0.03)
    pacer.wait(second)
    assert time.perf_counter() - begin >= 0.05


def test_compute_hides_what_the_link_carries_meanwhile() -> None:
    pacer = LinkPacer(1e6)
    deadline = pacer.post(10_000)
    time.sleep(0.02)
    begin = time.perf_counter()
    pacer.wait(deadline)
    assert time.perf_counter() - begin < 0.009


@pytest.mark.parametrize("rate", [0, -1.0, float("nan")])
def test_a_link_has_a_rate(rate: float) -> None:
    with pytest.raises(ConfigError, match="above 0"):
        LinkPacer(rate)


def test_the_wire_counts_by_kind_and_paces_only_what_is_sent() -> None:
    wire = Wire()
    assert wire.post("ring", 100) is None
    wire.pacer = LinkPacer(1e9)
    assert wire.post("ring", 0) is None
    assert wire.post("ulysses", 50) is not None
    assert dict(wire.sent) == {"ring": 100, "ulysses": 50}


def test_a_failed_transfer_names_what_and_with_whom() -> None:
    with (
        pytest.raises(TransferError, match=r"ring: a transfer with rank 3 failed: reset"),
        naming("ring", [3]),
    ):
        raise RuntimeError("reset")


def test_one_rank_needs_no_process_group() -> None:
    world = DataWorld(alone=True)
    assert (world.rank, world.size, world.communicators) == (0, 1, 0)
    assert world.ensure_groups([(0, 1)]) == 0
    with pytest.raises(ConfigError, match="torchrun"):
        _ = world.group
    with pytest.raises(ConfigError, match="groups are made at the start of a step"):
        world.block_group(0, 2)
