"""How keys and values, and their gradients, travel between the outer members of a block.

Rotation: every member passes what it holds to the next; after outer - 1 hops all have seen all.
Gradients follow one step behind and make one more hop, home. Direct: where a mask leaves some pairs
of members nothing to see (window, documents), shards go straight to those that need them and the
other steps are skipped; gradients go straight home. Both keep one transfer in flight while the
consumer computes (double buffer), and both post messages in the same order on all members.

kv is [2, t, Hk, D]: keys and values in one message.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_dcp.dist import Pending, PlacementContext
from megatron_dcp.schemes.core import needs, sees_everything
from megatron_dcp.schemes.masks import Mask


def rotates(ctx: PlacementContext, mask: Mask) -> bool:
    """Whether rotation serves the mask: no pair of members could be skipped."""
    if sees_everything(ctx, mask):
        return True
    n = ctx.outer
    return all(needs(ctx, mask, q, k) for q in range(n) for k in range(n))


def _kv_like(kv: Tensor, tokens: int) -> Tensor:
    return kv.new_empty((2, tokens, *kv.shape[2:]))


def kv_steps(
    kv: Tensor, ctx: PlacementContext, mask: Mask, kind: str
) -> Iterator[tuple[int, Tensor | None]]:
    """Yields (member, its kv), own first; kv is None where none of it is seen (and it stayed)."""
    return _rotate(kv, ctx, kind) if rotates(ctx, mask) else _fetch(kv, ctx, mask, kind)


def _rotate(kv: Tensor, ctx: PlacementContext, kind: str) -> Iterator[tuple[int, Tensor | None]]:
    n, me = ctx.outer, ctx.member
    following, before = ctx.peer((me + 1) % n), ctx.peer((me - 1) % n)
    held = kv
    for step in range(n):
        pending: Pending | None = None
        if step + 1 < n:
            arriving = _kv_like(kv, ctx.member_tokens((me - step - 1) % n))
            pending = ctx.world.wire.start_exchange(
                [(held, following)], [(arriving, before)], ctx.world.group, kind
            )
        yield (me - step) % n, held
        if pending is not None:
            pending.wait()
            held = arriving


def _fetch(
    kv: Tensor, ctx: PlacementContext, mask: Mask, kind: str
) -> Iterator[tuple[int, Tensor | None]]:
    n, me = ctx.outer, ctx.member
    held: Tensor | None = kv
    for step in range(n):
        pending: Pending | None = None
        arriving: Tensor | None = None
        if step + 1 < n:
            to, source = (me + step + 1) % n, (me - step - 1) % n
            sends = [(kv, ctx.peer(to))] if needs(ctx, mask, to, me) else []
            receives = []
            if needs(ctx, mask, me, source):
                arriving = _kv_like(kv, ctx.member_tokens(source))
                receives = [(arriving, ctx.peer(source))]
            pending = ctx.world.wire.start_exchange(sends, receives, ctx.world.group, kind)
        yield (me - step) % n, held
        if pending is not None:
            pending.wait()
        held = arriving


class GradientCourier:
    """Brings the gradients of kv home. `give` once per `kv_steps` step, in order; then `home`.

    What is given is in the accumulation type and is the courier's from then on. Every step posts
    its messages at the same place of the program on all members, also where it has nothing to send:
    messages between two ranks are told apart by their order alone.
    """

    def __init__(self, ctx: PlacementContext, mask: Mask, kind: str) -> None:
        self._ctx, self._mask, self._kind = ctx, mask, kind
        self._rotates = rotates(ctx, mask)
        self._pending: list[Pending] = []
        self._arriving: list[Tensor] = []
        self._own: Tensor | None = None

    def give(self, member: int, dkv: Tensor | None) -> None:
        """What this member's queries give to the kv of `member`; None: they see nothing of it."""
        if member == self._ctx.member:
            self._own = dkv
        if self._rotates:
            assert dkv is not None
            self._pass_on(member, dkv)
        elif member != self._ctx.member:
            self._send_home(member, dkv)

    def _pass_on(self, member: int, dkv: Tensor) -> None:
        ctx = self._ctx
        n, me = ctx.outer, ctx.member
        if n == 1:
            return
        if self._pending:
            self._pending.pop().wait()
            dkv += self._arriving.pop()
        tokens = ctx.member_tokens((member - 1) % n)
        arriving = dkv.new_empty((2, tokens, *dkv.shape[2:]))
        pending = ctx.world.wire.start_exchange(
            [(dkv, ctx.peer((me + 1) % n))],
            [(arriving, ctx.peer((me - 1) % n))],
            ctx.world.group,
            self._kind,
        )
        self._pending.append(pending)
        self._arriving.append(arriving)

    def _send_home(self, member: int, dkv: Tensor | None) -> None:
        ctx = self._ctx
        n, me = ctx.outer, ctx.member
        source = (2 * me - member) % n  # as far ahead of us as `member` is behind
        receives = []
        if needs(ctx, self._mask, source, me):
            arriving = torch.empty_like(self._take_own())
            self._arriving.append(arriving)
            receives = [(arriving, ctx.peer(source))]
        sends = [] if dkv is None else [(dkv, ctx.peer(member))]
        self._pending.append(
            ctx.world.wire.start_exchange(sends, receives, ctx.world.group, self._kind)
        )

    def home(self) -> Tensor:
        """The whole gradient of this member's own kv [2, t, Hk, D]."""
        for pending in self._pending:
            pending.wait()
        if self._rotates and self._arriving:
            return self._arriving[0]
        own = self._take_own()
        for part in self._arriving:
            own += part
        return own

    def _take_own(self) -> Tensor:
        assert self._own is not None
        return self._own
