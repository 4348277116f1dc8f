"""Every byte that crosses ranks goes through a `Wire`: collectives, counters, pacing, timing.

One small seat, so that the bytes counted, the link that is modelled and the time that is measured
are those of the same calls. Counted bytes are what this rank sends to others (what it keeps is
not); `sent` is keyed by the kind that the caller names: "ulysses", "ring", "allgather", "exchange",
"reduce", "agree", "rendezvous", each followed by ".backward" where the backward sends it.

Tensors travel as bytes, so every dtype works on every backend. Messages of zero bytes are not sent:
both ends know the sizes.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dcp.dist.pacing import LinkPacer
from megatron_dcp.errors import TransferError

CommListener = Callable[[str, int, int], None]


def as_bytes(x: Tensor) -> Tensor:
    """A contiguous tensor seen as flat bytes."""
    return x.contiguous().view(-1).view(torch.uint8)


class Pending:
    """Messages under way; `wait` returns when all have arrived and the link has sent ours.

    peers: for each work the data ranks at its other end, for the message of a failure.
    """

    def __init__(
        self,
        wire: Wire,
        kind: str,
        works: Sequence[Any],
        peers: Sequence[Sequence[int]],
        deadline: float | None,
        keep: Any,
    ) -> None:
        self._wire, self._kind, self._works, self._deadline = wire, kind, works, deadline
        self._peers = peers
        self._keep = keep  # buffers must outlive the transfer

    def wait(self) -> None:
        begin = time.monotonic_ns()
        for work, peers in zip(self._works, self._peers, strict=True):
            with naming(self._kind, peers):
                work.wait()
        self._wire.settle(self._deadline)
        self._wire.heard(self._kind, begin)
        self._works, self._peers, self._keep = (), (), None


@contextmanager
def naming(kind: str, peers: Sequence[int]) -> Iterator[None]:
    """Turn a backend's error into one that says which message failed and with which ranks."""
    try:
        yield
    except RuntimeError as error:
        who = f"rank {peers[0]}" if len(peers) == 1 else f"one of ranks {list(peers)}"
        raise TransferError(
            f"{kind}: a transfer with {who} failed: {error}. That rank has died, hangs, or the link "
            "is down; look at its output first"
        ) from error


def others(group: dist.ProcessGroup) -> list[int]:
    """Global ranks of a group but this one."""
    return [r for r in dist.get_process_group_ranks(group) if r != dist.get_rank()]


class Wire:
    """Counters, pacer and listener of one rank's communication.

    pacer: None, or a LinkPacer; listener(kind, start_ns, end_ns) hears every blocking interval.
    before_next: called once, before the next message is sent.
    """

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self.calls = 0  # messages and collectives begun: how far a rank has come
        self.pacer: LinkPacer | None = None
        self.listener: CommListener | None = None
        self.before_next: Callable[[], None] | None = None

    def post(self, kind: str, nbytes: int) -> float | None:
        """Count bytes and queue them on the link."""
        if self.before_next is not None:
            hook, self.before_next = self.before_next, None
            hook()
        self.sent[kind] += nbytes
        self.calls += 1
        return self.pacer.post(nbytes) if self.pacer is not None and nbytes else None

    def settle(self, deadline: float | None) -> None:
        if deadline is not None and self.pacer is not None:
            self.pacer.wait(deadline)

    def heard(self, kind: str, begin_ns: int) -> None:
        if self.listener is not None:
            self.listener(kind, begin_ns, time.monotonic_ns())

    def start_all_to_all(
        self,
        out: Tensor,
        send: Tensor,
        out_rows: Sequence[int],
        send_rows: Sequence[int],
        group: dist.ProcessGroup,
        kind: str,
    ) -> Pending:
        """Rows of dim 0 to and from every rank of a group; row counts per rank, zeros allowed."""
        me = dist.get_rank(group)
        row = math.prod(send.shape[1:]) * send.element_size()
        deadline = self.post(kind, row * (sum(send_rows) - send_rows[me]))
        width_out = math.prod(out.shape[1:]) * out.element_size()
        flat, peers = as_bytes(send), others(group)
        with naming(kind, peers):
            work = dist.all_to_all_single(
                as_bytes(out),
                flat,
                [n * width_out for n in out_rows],
                [n * row for n in send_rows],
                group=group,
                async_op=True,
            )
        return Pending(self, kind, [work], [peers], deadline, (flat, out))

    def all_to_all(
        self,
        out: Tensor,
        send: Tensor,
        out_rows: Sequence[int],
        send_rows: Sequence[int],
        group: dist.ProcessGroup,
        kind: str,
    ) -> Tensor:
        """Blocking `start_all_to_all`; returns `out`, which must be contiguous."""
        self.start_all_to_all(out, send, out_rows, send_rows, group, kind).wait()
        return out

    def start_exchange(
        self,
        sends: Sequence[tuple[Tensor, int]],
        receives: Sequence[tuple[Tensor, int]],
        group: dist.ProcessGroup,
        kind: str,
    ) -> Pending:
        """Point-to-point messages: (tensor, group rank). Received tensors must be contiguous."""
        ops: list[dist.P2POp] = []
        peers: list[list[int]] = []
        keep: list[Tensor] = []
        nbytes = 0
        for tensor, peer in sends:
            if tensor.numel():
                flat = as_bytes(tensor)
                keep.append(flat)
                nbytes += flat.numel()
                peers.append([peer])
                ops.append(dist.P2POp(dist.isend, flat, group=group, group_peer=peer))
        for tensor, peer in receives:
            if tensor.numel():
                flat = as_bytes(tensor)
                keep.append(flat)
                peers.append([peer])
                ops.append(dist.P2POp(dist.irecv, flat, group=group, group_peer=peer))
        deadline = self.post(kind, nbytes)
        everyone = [p for x in peers for p in x]
        with naming(kind, everyone):
            works = dist.batch_isend_irecv(ops) if ops else []
        if len(works) != len(ops):  # a backend that coalesces gives one work for all
            peers = [everyone] * len(works)
        return Pending(self, kind, works, peers, deadline, keep)

    def all_reduce(self, x: Tensor, group: dist.ProcessGroup, kind: str = "reduce") -> Tensor:
        """Sum in place; counted as the 2 (n-1)/n of its bytes that a ring all-reduce sends."""
        begin = time.monotonic_ns()
        n = dist.get_world_size(group)
        deadline = self.post(kind, 2 * (n - 1) * x.numel() * x.element_size() // n)
        with naming(kind, others(group)):
            dist.all_reduce(x, group=group)
        self.settle(deadline)
        self.heard(kind, begin)
        return x

    def all_gather_rows(self, x: Tensor, group: dist.ProcessGroup, kind: str) -> Tensor:
        """Equal-sized 1-D tensors of all ranks, stacked: [n, len]."""
        begin = time.monotonic_ns()
        n = dist.get_world_size(group)
        out = torch.empty((n, x.numel()), dtype=x.dtype, device=x.device)
        deadline = self.post(kind, (n - 1) * x.numel() * x.element_size())
        with naming(kind, others(group)):
            dist.all_gather(list(out.unbind(0)), x.contiguous(), group=group)
        self.settle(deadline)
        self.heard(kind, begin)
        return out
