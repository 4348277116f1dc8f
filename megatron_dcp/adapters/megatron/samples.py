"""From the items of Megatron's data iterator to samples of known length.

An item is one microbatch of the static run: a dict of tensors [batch, seq, ...] (`tokens`,
`labels`, `loss_mask`, `position_ids`, anything else per token) and, for packed data sets,
`cu_seqlens` with the boundaries of the sequences; or a list of such dicts of tensors [seq, ...],
as loaders of variable-length data sets give it. A row becomes one sample, or one per document:

* `cu_seqlens` present: its boundaries (SFT and inter-document masking);
* split `documents`: where `position_ids` restarts, else after each end-of-document token;
* split `windows`: the row as it is.

Tokens at the end of a sample whose loss weight is 0 influence nothing under causal attention and
are cut: padding is never sent nor computed. A sample without any weighted token is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from megatron_dcp.errors import AdapterError

# Fields of an item that describe the row and not its tokens.
ROW_FIELDS = frozenset(
    {
        "attention_mask", "cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size",
        "hybrid_cp_group", "dataset_id", "original_seq_len", "padded_seq_len",
    }
)  # fmt: skip
WEIGHT = "loss_mask"

Sample = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Splitter:
    """How rows become samples.

    split: `windows` or `documents`. eod: id of the end-of-document token, used for `documents`
    where position ids do not restart. trim: cut trailing weightless tokens.
    """

    split: str = "windows"
    eod: int | None = None
    restarts: bool = False
    trim: bool = True

    def samples(self, item: Mapping[str, object] | list[Any]) -> list[Sample]:
        """The samples of one item, in order. Raises AdapterError when it has no lengths."""
        if isinstance(item, list):
            return [sample for one in item for sample in self.samples(one)]
        tokens, fields = _token_fields(item)
        out = []
        for row in range(tokens.shape[0]):
            cuts = self._cuts(item, fields, row, tokens.shape[1])
            for begin, end in pairwise(cuts):
                sample = {name: value[row, begin:end] for name, value in fields.items()}
                kept = _weighted_length(sample) if self.trim else end - begin
                if kept:
                    out.append({name: value[:kept] for name, value in sample.items()})
        return out

    def _cuts(
        self, item: Mapping[str, object], fields: Mapping[str, torch.Tensor], row: int, width: int
    ) -> list[int]:
        """Ascending boundaries of the row's sequences, from 0 to its width."""
        cu = item.get("cu_seqlens")
        if isinstance(cu, torch.Tensor):
            inner = (cu[row] if cu.dim() == 2 else cu).tolist()
        elif self.split == "windows":
            inner = []
        elif self.restarts and "position_ids" in fields:
            inner = (fields["position_ids"][row] == 0).nonzero().flatten().tolist()
        elif self.eod is not None:
            inner = ((fields["tokens"][row] == self.eod).nonzero().flatten() + 1).tolist()
        else:
            raise AdapterError(
                "split 'documents' was asked and the data set marks no documents: looked for "
                "cu_seqlens, restarting position_ids (--reset-position-ids) or an "
                f"end-of-document token; found fields {sorted(fields)}. Use --mdcp-split windows"
            )
        return sorted({0, width, *(int(c) for c in inner if 0 < c < width)})


def _token_fields(item: Mapping[str, object]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The tokens [batch, seq] and every per-token tensor [batch, seq, ...] of an item."""
    if not isinstance(item, Mapping) or not isinstance(item.get("tokens"), torch.Tensor):
        found = sorted(item) if isinstance(item, Mapping) else type(item).__name__
        raise AdapterError(
            "the data iterator gives items without lengths: looked for a dict with a tensor "
            f"'tokens' [batch, seq], found {found}. Give mdcp a reader "
            "(MegatronDcp(reader=...)) that turns an item into samples"
        )
    tokens = item["tokens"]
    assert isinstance(tokens, torch.Tensor)
    if tokens.dim() == 1:
        tokens = tokens[None]
    fields = {}
    for name, value in item.items():
        if name in ROW_FIELDS or not isinstance(value, torch.Tensor):
            continue
        value = value[None] if item["tokens"].dim() == 1 else value  # type: ignore[attr-defined]
        if value.shape[:2] == tokens.shape:
            fields[name] = value.contiguous()
    return tokens, fields


def _weighted_length(sample: Sample) -> int:
    """Length up to the last token with a loss weight; the whole sample when it has no weights."""
    weights = sample.get(WEIGHT)
    if weights is None:
        return len(sample["tokens"])
    last = weights.nonzero()
    return int(last[-1, 0]) + 1 if len(last) else 0


def check_weights(samples: Iterable[Sample]) -> None:
    """Loss weights must be integers: Megatron counts tokens in int32, per microbatch.

    A fraction would be cut off microbatch by microbatch and the denominator of the step would
    depend on the plan.
    """
    for i, sample in enumerate(samples):
        weights = sample.get(WEIGHT)
        if weights is not None and not torch.equal(weights, weights.round()):
            raise AdapterError(
                f"sample {i} has fractional loss weights; Megatron's per-token loss counts whole "
                "tokens per microbatch, so its denominator would depend on the plan. Use weights "
                "0 and 1, or a forward step of your own that scales the loss"
            )
