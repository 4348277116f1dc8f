"""Exchange-based dispatch: samples already sit on ranks; each placement's shards go where they run.

For data that every rank cannot read alike (streamed, produced on the rank): the rank that owns a
sample cuts it by the plan and sends every piece to the rank that runs it, one all-to-all per field
over the data group. Fields are per-token tensors of any dtype, so position grids and pixel values
travel with their tokens. Field names, dtypes and trailing shapes must be equal on all ranks; a rank
that owns nothing learns them from the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from megatron_dcp.dist import DataWorld, gather_bytes
from megatron_dcp.errors import AgreementError, ConfigError
from megatron_dcp.plan import Placement, StepPlan
from megatron_dcp.plan.shards import Span, shard_map

Piece = tuple[int, int, Span]  # placement number, sample id, span inside the sample


def pieces_by_rank(plan: StepPlan) -> list[list[Piece]]:
    """For every data rank the pieces that it runs, in the order in which it runs them."""
    out: list[list[Piece]] = [[] for _ in range(plan.topology.data_ranks)]
    for number, p in enumerate(plan.placements):
        lengths = [plan.lengths[i] for i in p.samples]
        for b, spans in enumerate(shard_map(lengths, p.degree, p.inner_degree).ranks):
            out[p.first_rank + b] += [(number, p.samples[s.sample], s) for s in spans]
    return out


def fields_of(owned: Mapping[int, Mapping[str, Tensor]]) -> dict[str, tuple[str, list[int]]]:
    """Dtype and trailing shape of every field; ConfigError where samples differ in them."""
    mine: dict[str, tuple[str, list[int]]] = {}
    for fields in owned.values():
        found = {n: (str(x.dtype), list(x.shape[1:])) for n, x in sorted(fields.items())}
        if mine and found != mine:
            raise ConfigError(f"samples of one rank have different fields: {mine} and {found}")
        mine = found
    return mine


def agree_fields(
    world: DataWorld, owned: Mapping[int, Mapping[str, Tensor]], check: Callable[[], None]
) -> dict[str, Tensor]:
    """Empty prototypes [0, ...] of all fields, alike on all ranks. Collective.

    check: of this rank's samples. If any rank's raises, all ranks raise: nobody waits for a rank
    that has left.
    """
    mine: dict[str, tuple[str, list[int]]] = {}
    trouble: ConfigError | None = None
    try:
        check()
        mine = fields_of(owned)
    except ConfigError as error:
        trouble = error
    said = {"fields": mine, "trouble": None if trouble is None else str(trouble)}
    heard = [json.loads(b) for b in gather_bytes(world, json.dumps(said).encode())]
    if trouble is not None:
        raise trouble
    faults = [f"rank {r}: {t['trouble']}" for r, t in enumerate(heard) if t["trouble"]]
    if faults:
        raise AgreementError("the exchange cannot start; " + "; ".join(faults))
    known = {json.dumps(t["fields"]): r for r, t in enumerate(heard) if t["fields"]}
    if len(known) > 1:
        raise AgreementError(
            "ranks hold samples with different fields: "
            + "; ".join(f"rank {r}: {t}" for t, r in known.items())
        )
    agreed = json.loads(next(iter(known))) if known else {}
    return {
        n: torch.empty([0, *shape], dtype=getattr(torch, dtype.removeprefix("torch.")))
        for n, (dtype, shape) in agreed.items()
    }


def exchange(
    world: DataWorld,
    plan: StepPlan,
    owner: Sequence[int],
    owned: Mapping[int, Mapping[str, Tensor]],
) -> list[tuple[Placement, dict[str, Tensor]]]:
    """Send every piece of the step to the rank that runs it. Collective over the data ranks.

    owner: data rank that holds each sample (by sample id), the same on all ranks. owned: this
    rank's samples, id -> field -> [L, ...]. Returns this rank's placements in the order in which it
    runs them, each with its shard of every field [t, ...].
    """
    prototypes = agree_fields(world, owned, lambda: _check_owned(world, plan, owner, owned))
    wanted = pieces_by_rank(plan)
    numbers = [n for n, p in enumerate(plan.placements) if world.rank in p.ranks]
    rows = dict.fromkeys(numbers, 0)
    for n, _, span in wanted[world.rank]:
        rows[n] += span.stop - span.start
    shards: list[dict[str, Tensor]] = [{} for _ in numbers]
    for name, prototype in prototypes.items():
        received = _exchange_field(world, owner, owned, wanted, name, prototype)
        for shard, part in zip(
            shards, torch.split(received, [rows[n] for n in numbers]), strict=True
        ):
            shard[name] = part
    return list(zip(plan.of_rank(world.rank), shards, strict=True))


def _exchange_field(
    world: DataWorld,
    owner: Sequence[int],
    owned: Mapping[int, Mapping[str, Tensor]],
    wanted: Sequence[Sequence[Piece]],
    name: str,
    prototype: Tensor,
) -> Tensor:
    """One all-to-all; rows of this rank in the order of its pieces."""
    me = world.rank
    parts = [
        [owned[i][name][s.start : s.stop] for _, i, s in pieces if owner[i] == me]
        for pieces in wanted
    ]
    send_rows = [sum(x.shape[0] for x in p) for p in parts]
    send = torch.cat([prototype, *(x for p in parts for x in p)]).to(world.device)
    if world.size == 1:
        return send
    mine = wanted[me]
    rows_from = [
        sum(s.stop - s.start for _, i, s in mine if owner[i] == r) for r in range(world.size)
    ]
    out = send.new_empty((sum(rows_from), *send.shape[1:]))
    world.wire.all_to_all(out, send, rows_from, send_rows, world.group, "exchange")
    return _in_piece_order(out, rows_from, mine, owner)


def _in_piece_order(
    rows: Tensor, rows_from: Sequence[int], pieces: Sequence[Piece], owner: Sequence[int]
) -> Tensor:
    """Rows arrive by sender, each sender's in our order; put them into our order."""
    at = [sum(rows_from[:r]) for r in range(len(rows_from))]
    parts = []
    for _, i, s in pieces:
        r, n = owner[i], s.stop - s.start
        parts.append(rows[at[r] : at[r] + n])
        at[r] += n
    return torch.cat([rows[:0], *parts])


def _check_owned(
    world: DataWorld,
    plan: StepPlan,
    owner: Sequence[int],
    owned: Mapping[int, Mapping[str, Tensor]],
) -> None:
    if len(owner) != len(plan.lengths):
        raise ConfigError(f"{len(owner)} owners given for {len(plan.lengths)} samples")
    for i, r in enumerate(owner):
        if not 0 <= r < world.size:
            raise ConfigError(f"sample {i} has owner {r}, there are data ranks 0..{world.size - 1}")
        if r != world.rank:
            continue
        if i not in owned:
            raise ConfigError(f"sample {i} should be on rank {r}, which holds {sorted(owned)}")
        for name, x in owned[i].items():
            if x.shape[0] != plan.lengths[i]:
                raise ConfigError(
                    f"sample {i}: field {name} has {x.shape[0]} rows, the plan says "
                    f"{plan.lengths[i]} tokens"
                )
