"""A Trainer's data set as samples: one item through the trainer's own collator, without padding.

The collator makes the labels (completion masks, chat templates, language modelling), so whatever
the user configured stays in force; run on one item it has nothing to pad. What the plan provides
itself (attention mask, positions, sequence boundaries) is left out; of a row that was packed
beforehand the boundaries stay, as `documents`, and its positions, which start again in each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megatron_dcp.errors import AdapterError

_PLANNED = (
    "attention_mask", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q",
    "max_length_k", "seq_idx", "cache_position", "num_items_in_batch",
)  # fmt: skip
_BOUNDARIES = ("position_ids", "seq_idx", "cu_seq_lens_q")

Collate = Callable[[list[Any]], Mapping[str, Any]]


class CollatedDataset:
    """Items of `dataset` through `collate`, as per-token tensors [L, ...]; fields named in
    `per_sample` (images) stay as the collator gives them."""

    def __init__(self, dataset: Any, collate: Collate, per_sample: tuple[str, ...] = ()) -> None:
        self.dataset, self.collate, self.per_sample = dataset, collate, per_sample

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        batch = dict(self.collate([self.dataset[int(index)]]))
        ids = batch.get("input_ids")
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.shape[0] != 1:
            raise AdapterError(
                f"sample {index}: the data collator gave no input_ids of shape [1, tokens] for one "
                f"item, only {sorted(batch)}; use a collator of token ids (language modelling, SFT)"
            )
        mask = batch.get("attention_mask")
        if mask is not None and (mask.shape != ids.shape or bool((mask > 1).any())):
            raise AdapterError(
                f"sample {index}: attention_mask of shape {tuple(mask.shape)} says more than which "
                "tokens are padding, and is not followed; mark documents inside a row by "
                "position_ids that start again at 0"
            )
        keep = None if mask is None else mask[0].bool()
        if keep is not None and bool(keep.all()):
            keep = None
        out: dict[str, Any] = {}
        for name, value in batch.items():
            if name in _PLANNED:
                continue
            if name in self.per_sample:
                out[name] = value
                continue
            if not isinstance(value, Tensor) or value.shape[:2] != ids.shape:
                raise AdapterError(
                    f"sample {index}: field {name!r} of the collated item is not [1, tokens, ...]; "
                    "only per-token fields follow their tokens across ranks: drop it in the "
                    "collator or from the data set"
                )
            out[name] = value[0] if keep is None else value[0][keep]
        lengths = document_lengths(batch, keep, index)
        if lengths is None:
            return out
        if len(lengths) > 1 and self.per_sample:
            raise AdapterError(
                f"sample {index} is a row of {len(lengths)} documents packed beforehand; with "
                "images give every document as an item of its own, the planner packs"
            )
        if len(lengths) > 1:
            out["documents"] = lengths
        if not self.per_sample:  # every item alike: fields of a step's samples must agree
            out["position_ids"] = torch.cat([torch.arange(n) for n in lengths])
        return out


def document_lengths(batch: Mapping[str, Any], keep: Tensor | None, index: int) -> list[int] | None:
    """Lengths of the documents in a collated row, its padding cut; None: it does not say.

    Boundaries are where `position_ids` start again (3-D ones, of images, say nothing), where
    `seq_idx` changes, and those of `cu_seq_lens_q`.
    """
    row = batch["input_ids"]
    begins: list[Tensor] = []
    for name in _BOUNDARIES:
        value = batch.get(name)
        if not isinstance(value, Tensor):
            continue
        if name == "cu_seq_lens_q":
            sizes = value.diff()
            value = torch.repeat_interleave(torch.arange(len(sizes)), sizes)[None]
        elif value.dim() != 2:
            continue
        if value.shape != row.shape:
            raise AdapterError(
                f"sample {index}: {name} covers {value.shape[-1]} tokens of a row of "
                f"{row.shape[-1]}"
            )
        value = value[0] if keep is None else value[0][keep]
        new = value.diff() != int(name == "position_ids")
        if name == "position_ids" and bool(value[1:][new].any()):
            raise AdapterError(
                f"sample {index}: position_ids jump to a position other than 0; inside a row they "
                "go on by one or start again at 0 with a new document"
            )
        begins.append(new)
    if not begins:
        return None
    new = torch.stack(begins).any(0)
    starts = [0, *(new.nonzero().flatten() + 1).tolist(), len(new) + 1]
    return [b - a for a, b in pairwise(starts)]


def token_counts(dataset: Any, length_column: str | None = None) -> list[int]:
    """Length of every item, from a length column, the `input_ids` column, or the items."""
    columns = list(getattr(dataset, "column_names", None) or [])
    if length_column and length_column in columns:
        return [int(n) for n in dataset[length_column]]
    if "input_ids" in columns:
        return [len(ids) for ids in dataset["input_ids"]]
    try:
        return [len(dataset[i]["input_ids"]) for i in range(len(dataset))]
    except (KeyError, TypeError, IndexError) as error:
        raise AdapterError(
            f"the lengths of {type(dataset).__name__} cannot be read ({type(error).__name__}: "
            f"{error}): items need `input_ids`, or the data set a column "
            f"{length_column or 'length'!r}; tokenize it first"
        ) from error


class StepNumbers(torch.utils.data.Dataset[int]):
    """0 .. steps - 1: what a Trainer's loader yields, one per optimizer step.

    Samples are fetched by the engine, so that skipping steps on a resume costs nothing.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> int:
        return index


def step_batch(numbers: list[int]) -> dict[str, int]:
    """The item of one optimizer step, as a Trainer's batch."""
    return {"mdcp_step": numbers[0]}
