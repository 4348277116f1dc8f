"""A microbatch of the plan as Megatron's forward step gets it, and the forward step itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_dcp.adapters.megatron.attention import packed_params
from megatron_dcp.adapters.megatron.collect import FieldSpec
from megatron_dcp.adapters.megatron.domain import Domain
from megatron_dcp.adapters.megatron.slots import Slot
from megatron_dcp.dist import PlacementContext, make_context
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
    """The loss function of the script whose forward step was given, else `sum_loss`.

    A script such as pretrain_gpt.py defines `loss_func(loss_mask, output_tensor, model=None)` next
    to its forward step; it is kept, with its checks for NaN and spikes.
    """
    scope = getattr(forward_step, "__globals__", {})
    found = scope.get("loss_func")
    if callable(found):
        names = list(inspect.signature(found).parameters)
        if names[:2] == ["loss_mask", "output_tensor"]:
            return found  # type: ignore[no-any-return]
    return sum_loss


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
