"""Reading one step's samples and telling every rank their lengths.

Only tensor rank 0 of stages that own data has an iterator. It pulls as many items as the static
run would, splits them into samples, and the lengths of all data-parallel ranks are gathered in its
plane; planes without data (other tensor ranks, middle stages) get the table by broadcast. What went
wrong on one rank is raised on all of them, before the first collective of the step.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_dcp.adapters.megatron.domain import Domain
from megatron_dcp.adapters.megatron.samples import WEIGHT, Sample, check_weights
from megatron_dcp.dist import gather_bytes
from megatron_dcp.errors import AdapterError, MdcpError

log = logging.getLogger("megatron_dcp")

Reader = Callable[[Mapping[str, object]], list[Sample]]
FieldSpec = tuple[str, torch.dtype, tuple[int, ...]]  # name, dtype, shape of one token


@dataclass(slots=True, kw_only=True)
class StepData:
    """The step's samples: lengths and owners of all, tensors of those read here.

    mine is None on ranks without an iterator. fields: the per-token fields of every sample.
    trouble: why this rank cannot run the step, where the table came too early to tell it.
    """

    lengths: tuple[int, ...]
    owners: tuple[int, ...]
    fields: tuple[FieldSpec, ...]
    weight: float
    mine: dict[int, Sample] | None = None
    trouble: str | None = None


def iterators_of(data_iterator: Any) -> list[Any]:
    """The distinct iterators of a (possibly interleaved) data_iterator argument."""
    many = data_iterator if isinstance(data_iterator, (list, tuple)) else [data_iterator]
    found: list[Any] = []
    for it in many:
        if it is not None and all(it is not other for other in found):
            found.append(it)
    return found


def _pull(iterators: Sequence[Iterator[Any]], count: int) -> list[Any]:
    """`count` items of the first iterator; the others (chunks of the stage) keep in step."""
    items = [next(iterators[0]) for _ in range(count)]
    for other in iterators[1:]:
        for _ in range(count):
            next(other)
    return items


def _read(
    domain: Domain, data_iterator: Any, count: int, reader: Reader
) -> tuple[list[Sample] | None, str | None]:
    """(samples, trouble) of this rank; samples None where there is nothing to read."""
    iterators = iterators_of(data_iterator) if domain.tp_rank == 0 else []
    if not iterators:
        first = domain.tp_rank == 0 and domain.pp_rank == 0
        return None, "the data iterator is None on the first stage" if first else None
    try:
        samples = [s for item in _pull(iterators, count) for s in reader(item)]
        check_weights(samples)
    except StopIteration:
        return [], f"the data iterator ended before the {count} microbatches of the step"
    except MdcpError as error:
        return [], str(error)
    except Exception as error:  # of a loader or a reader: the other ranks must hear of it
        log.exception("this rank could not read its samples")
        return [], f"{type(error).__name__}: {error}"
    return samples, None


def _header(samples: Sequence[Sample], trouble: str | None) -> bytes:
    """Lengths, weights and fields of one rank's samples as JSON."""
    weight = sum(float(s[WEIGHT].sum()) if WEIGHT in s else len(s["tokens"]) for s in samples)
    body = {
        "lengths": [len(s["tokens"]) for s in samples],
        "weight": weight,
        "fields": _describe(samples[0]) if samples else None,
        "trouble": trouble,
    }
    return json.dumps(body).encode()


def _describe(sample: Sample) -> list[list[object]]:
    return [
        [name, str(x.dtype).removeprefix("torch."), list(x.shape[1:])]
        for name, x in sorted(sample.items())
    ]


def _broadcast(domain: Domain, payload: bytes | None) -> bytes:
    """Bytes of the first rank of the TP x PP group on all of it."""
    if domain.mp_size == 1:
        assert payload is not None
        return payload
    source = dist.get_global_rank(domain.mp_group, 0)
    first = dist.get_rank() == source
    device = domain.world.device
    size = torch.tensor([len(payload or b"")], dtype=torch.int64, device=device)
    dist.broadcast(size, source, group=domain.mp_group)
    if first and payload:
        data = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(device)
    else:
        data = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(data, source, group=domain.mp_group)
    return bytes(data.cpu().tolist())


def collect(domain: Domain, data_iterator: Any, count: int, reader: Reader) -> StepData:
    """Read this rank's samples and learn everybody's lengths. Collective over all processes.

    count: items per data-parallel rank. Raises AdapterError on every rank when one has trouble.
    """
    samples, trouble = _read(domain, data_iterator, count, reader)
    if domain.mp_size > 1:
        flag = torch.tensor([int(trouble is not None)], device=domain.world.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=domain.mp_group)
        if int(flag) and trouble is None:
            trouble = "another pipeline stage or tensor rank could not read its data; see its log"
    table = None
    if domain.tp_rank == 0 and domain.pp_rank == 0:
        payloads = gather_bytes(domain.world, _header(samples or [], trouble))
        headers = [json.loads(x) for x in payloads]
        troubles = [
            f"data-parallel rank {r // domain.cp}: {x['trouble']}"
            for r, x in enumerate(headers)
            if x["trouble"]
        ]
        # Static CP ranks hold the same samples: the first of each group speaks for it.
        body = {"rows": headers[:: domain.cp], "troubles": list(dict.fromkeys(troubles))}
        table = json.dumps(body).encode()
    told = json.loads(_broadcast(domain, table))
    if told["troubles"]:
        raise AdapterError(
            "the step cannot start, no rank has begun it. " + "; ".join(told["troubles"])
        )
    return _step_data(domain, told["rows"], samples)


def _step_data(
    domain: Domain, rows: Sequence[Mapping[str, Any]], samples: list[Sample] | None
) -> StepData:
    lengths: list[int] = []
    owners: list[int] = []
    firsts: list[int] = []
    for r, row in enumerate(rows):
        firsts.append(len(lengths))
        lengths += row["lengths"]
        owners += [domain.owner(r)] * len(row["lengths"])
    if not lengths:
        raise AdapterError(
            "the step holds no token with a loss weight on any rank; looked at "
            f"{len(rows)} data-parallel ranks. Check the data set's loss_mask"
        )
    fields = next(row["fields"] for row in rows if row["fields"])
    mine: dict[int, Sample] | None = None
    trouble = None
    if samples is not None:
        dp_rank, cp_rank = divmod(domain.world.rank, domain.cp)
        found = [len(s["tokens"]) for s in samples]
        if found != rows[dp_rank]["lengths"]:
            # A later stage or CP rank: the table is that of the first.
            trouble = (
                f"data-parallel rank {dp_rank}: stage {domain.pp_rank}, context rank {cp_rank} "
                f"reads other samples than the first ({len(found)} of {sum(found)} tokens here, "
                f"{len(rows[dp_rank]['lengths'])} of {sum(rows[dp_rank]['lengths'])} there); data "
                "sets must be equal on all of them"
            )
        first = firsts[dp_rank]
        mine = {first + i: s for i, s in enumerate(samples)} if cp_rank == 0 else {}
    return StepData(
        lengths=tuple(lengths),
        owners=tuple(owners),
        fields=tuple((n, getattr(torch, dtype), tuple(shape)) for n, dtype, shape in fields),
        weight=sum(s["weight"] for s in rows),
        mine=mine,
        trouble=trouble,
    )
