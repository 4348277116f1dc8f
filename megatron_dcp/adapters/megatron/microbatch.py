"""A microbatch of the plan as Megatron's forward step gets it, and the forward step itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dcp.adapters.megatron.attention import packed_params
from megatron_dcp.adapters.megatron.collect import FieldSpec
from megatron_dcp.adapters.megatron.domain import Domain
from megatron_dcp.adapters.megatron.slots import Slot
from megatron_dcp.dist import PlacementContext, make_context
from megatron_dcp.errors import AdapterError
from megatron_dcp.plan import Placement, StepPlan

LossFunc = Callable[..., tuple[Tensor, Tensor, dict[str, Tensor]]]


@dataclass(slots=True, kw_only=True)
class Microbatch:
    """One forward of one rank.

    fields: per-token tensors [1, rows, ...] (`tokens`, `labels`, `loss_mask`, `position_ids`, what
    else the data set gave), empty on stages without data. packed: the PackedSeqParams for the
    model. recompute: layers per stage. Rows beyond context.tokens are padding without weight.
    """

    fields: Mapping[str, Tensor]
    packed: Any
    context: PlacementContext
    recompute: int = 0
    recompute_kind: str = "layers"

    def get(self, name: str) -> Tensor | None:
        return self.fields.get(name)


def _rows(tokens: int, multiple: int) -> int:
    """Rows of a microbatch: at least one, and a multiple of the sequence-parallel ranks."""
    return max(1, -(-tokens // multiple)) * multiple


def _batched(fields: Mapping[str, Tensor], rows: int) -> dict[str, Tensor]:
    """[tokens, ...] tensors as [1, rows, ...], padding rows zero."""
    out = {}
    for name, x in fields.items():
        if len(x) < rows:
            x = torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])])
        out[name] = x[None]
    return out


def build_microbatches(
    domain: Domain,
    plan: StepPlan,
    slots: Sequence[Slot],
    local: Mapping[int, Mapping[str, Tensor]] | None,
    specs: Sequence[FieldSpec],
    *,
    multiple: int,
    step: int,
) -> list[Microbatch]:
    """The microbatches of this rank in order; local: fields by placement, None without data."""
    world = domain.world
    out = []
    for position, slot in enumerate(slots):
        if slot.index is None:
            placement = Placement(slot=position, first_rank=world.rank, degree=1, samples=())
            context = make_context(world, placement, [1], sample_keys=[-1], dummy=True, step=step)
            fields: Mapping[str, Tensor] = {
                name: torch.zeros(1, *shape, dtype=dtype, device=world.device)
                for name, dtype, shape in specs
            }
        else:
            placement = plan.placements[slot.index]
            context = make_context(
                world, placement, [plan.lengths[i] for i in placement.samples], step=step
            )
            fields = local[slot.index] if local is not None else {}
        rows = _rows(context.rows, multiple)
        out.append(
            Microbatch(
                fields=_with_positions(fields, context, rows) if local is not None else {},
                packed=packed_params(context, rows),
                context=context,
                recompute=slot.recompute,
                recompute_kind=slot.recompute_kind,
            )
        )
    return out


def _with_positions(
    fields: Mapping[str, Tensor], context: PlacementContext, rows: int
) -> dict[str, Tensor]:
    """Batched fields; position ids and weights are made where the data set gives none."""
    full = dict(fields)
    full.setdefault("position_ids", context.position_ids)
    if "loss_mask" not in full:
        n = context.tokens
        full["loss_mask"] = torch.full((n,), float(not context.dummy), device=context.world.device)
    return _batched(full, rows)


class Peek:
    """An iterator over one microbatch that can be looked at first."""

    def __init__(self, iterator: Iterator[Microbatch]) -> None:
        self._next = next(iterator)

    def peek(self) -> Microbatch:
        return self._next

    def __iter__(self) -> Peek:
        return self

    def __next__(self) -> Microbatch:
        return self._next


def sum_loss(
    loss_mask: Tensor, output_tensor: Tensor, model: Any = None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Per-token loss: weighted sum, number of weighted tokens (int32), report for the log."""
    weights = loss_mask.view(-1).float()
    loss = torch.sum(output_tensor.view(-1).float() * weights)
    count = weights.sum().detach().to(torch.int)
    report = torch.cat([loss.detach().view(1), count.float().view(1)])
    return loss, count, {"lm loss": report}


def loss_of(forward_step: Callable[..., Any] | None) -> LossFunc:
    """The loss function of the script whose forward step was given; `sum_loss` without one.

    A script such as pretrain_gpt.py defines `loss_func(loss_mask, output_tensor, model=None)` next
    to its forward step; it is kept, with its checks for NaN and spikes. Raises AdapterError for a
    forward step without it: what else it does to the loss cannot be seen from outside.
    """
    if forward_step is None:
        return sum_loss
    function: Any = forward_step
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(function)
    found = getattr(function, "__globals__", {}).get("loss_func")
    named = "loss_func" in getattr(getattr(function, "__code__", None), "co_names", ())
    if named and callable(found):
        names = list(inspect.signature(found).parameters)
        if len(names) > 1 and names[0] == "loss_mask":
            return found  # type: ignore[no-any-return]
    raise AdapterError(
        f"forward step {getattr(function, '__qualname__', repr(function))} of "
        f"{getattr(function, '__module__', '?')}: looked for a loss_func(loss_mask, output_tensor) "
        "of its module that it uses, found none. Name a forward step for planned microbatches: "
        "--mdcp-forward-step package.module:function, or MegatronDcp(forward_step=...)"
    )


def per_token(loss: LossFunc) -> LossFunc:
    """`loss`, refused unless it gives a sum over tokens, their number and a report."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        out = loss(*args, **kwargs)
        if not isinstance(out, tuple) or len(out) != 3:
            found = f"{len(out)} values" if isinstance(out, tuple) else type(out).__name__
            raise AdapterError(
                f"loss function: looked for (sum over tokens, number of tokens, report), found "
                f"{found}: a mean over a microbatch depends on the plan. Return the sum and the "
                "number of weighted tokens, as Megatron's per-token loss does"
            )
        return out

    return checked


def gpt_forward_step(loss: LossFunc, iterator: Iterator[Microbatch], model: Any) -> Any:
    """Forward of one microbatch through a GPTModel: (output, loss function)."""
    mb = next(iterator)
    output = model(
        mb.get("tokens"),
        mb.get("position_ids"),
        None,
        labels=mb.get("labels"),
        loss_mask=mb.get("loss_mask"),
        packed_seq_params=mb.packed,
    )
    return output, partial(loss, mb.get("loss_mask"))


def summed_reports(domain: Domain, reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """An evaluation's reports as one, where each is (sum, number of tokens) by name.

    Summed over microbatches and data ranks: with --sft Megatron takes the mean of every microbatch
    and then over ranks, which depends on the plan and counts dummies; of one report that is the
    same on every rank both of its ways give the mean over tokens. Collective over the plane.
    Reports of another shape are left as they are.
    """
    if not reports or any(
        not isinstance(x, Tensor) or x.numel() != 2 for report in reports for x in report.values()
    ):
        return reports
    out = {}
    for name in reports[0]:
        total = torch.stack([r[name].detach().view(-1).double() for r in reports]).sum(0)
        if domain.world.size > 1:
            dist.all_reduce(total, group=domain.world.group)
        out[name] = total.to(reports[0][name].dtype)
    return [out]
