"""A placement's samples become this rank's tensors: its shard of the pack, nothing more.

Every rank knows all lengths and reads only the samples of its own placements. Embeddings, norms,
MLP and loss run on local tokens alone; nothing is replicated over a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_dcp.dispatch.samples import Sample
from megatron_dcp.dist import DataWorld, PlacementContext, make_context
from megatron_dcp.errors import ConfigError
from megatron_dcp.plan import Placement
from megatron_dcp.plan.shards import Span


@dataclass(slots=True, kw_only=True)
class Shard:
    """One microbatch of one rank. t rows: its tokens, or one filler of weight 0.

    inputs: name -> [t, ...], with position_ids [t] int64. labels [t] int64, -100 where nothing is
    predicted. weights [t]: loss weight of each label. weight: their sum, computed in float64.
    whole: per-sample fields of all samples of the placement, one after the other, [sum n, ...].
    """

    context: PlacementContext
    inputs: dict[str, Tensor]
    labels: Tensor
    weights: Tensor
    weight: float
    whole: dict[str, Tensor]


def local_rows(fields: Sequence[Tensor], spans: Sequence[Span]) -> Tensor:
    """The rows of `spans` out of one tensor per sample, [t, ...]; an empty shard gets one row."""
    parts = [fields[s.sample][s.start : s.stop] for s in spans]
    return torch.cat(parts) if parts else fields[0][:1].clone()


def build_shard(
    world: DataWorld,
    placement: Placement,
    samples: Sequence[Sample],
    *,
    sample_keys: Sequence[int] | None = None,
    weight_dtype: torch.dtype = torch.float32,
    shapes: Sequence[tuple[int, int, int]] | None = None,
    step: int = 0,
    dummy: bool = False,
) -> Shard:
    """This rank's shard of a placement; `samples` in the order of `placement.samples`.

    shapes: (frames, height, width) of each sample, for attention over the grid.
    """
    with_documents = [s.documents is not None for s in samples]
    lengths = [s.length for s in samples]
    documents = None
    if any(with_documents):
        documents = [s.documents or (s.length,) for s in samples]
    prefix = None
    if any(s.prefix is not None for s in samples):
        prefix = [s.prefix or 0 for s in samples]
    context = make_context(
        world,
        placement,
        lengths,
        sample_keys=sample_keys,
        documents=documents,
        prefix=prefix,
        shapes=shapes,
        padded=any(s.padding for s in samples),
        dummy=dummy,
        step=step,
    )
    spans = context.shards.ranks[context.block_rank]
    names = list(samples[0].inputs)
    for s in samples:
        found = [*s.inputs, *s.whole]
        if found != [*names, *samples[0].whole]:
            raise ConfigError(
                f"samples of one step have different fields: {[*names, *samples[0].whole]} and "
                f"{found}; every item must have the same per-token and per-sample fields"
            )
    device = world.device
    inputs = {n: local_rows([s.inputs[n] for s in samples], spans).to(device) for n in names}
    inputs.setdefault("position_ids", context.position_ids)
    weights = local_rows([s.weights for s in samples], spans)
    if context.filler:
        weights = torch.zeros_like(weights)
    labels = local_rows([s.labels for s in samples], spans)
    if dummy or context.filler:
        labels = labels.clamp(min=0)  # a real label: any loss of it is finite, and counts 0 times
    return Shard(
        context=context,
        inputs=inputs,
        labels=labels.to(device),
        weights=weights.to(device=device, dtype=weight_dtype),
        weight=float(weights.sum()),
        whole={n: torch.cat([s.whole[n] for s in samples]).to(device) for n in samples[0].whole},
    )
