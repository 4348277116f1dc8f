"""Reading samples: whatever a dataset returns becomes per-token tensors of one sample.

A dataset item is a 1-D array of token ids, or a mapping:

    labels           [L] aligned with the tokens; default the tokens themselves
    weights          [L] loss weight of each label, default 1; labels of -100 weigh nothing
    sample_weight    one number that scales the sample's weights
    documents        lengths of the documents inside the sample: attention stays inside each
    prefix           how many first tokens see each other both ways (prefix-LM)
    attention_mask   [L] accepted when all ones (samples are not padded here), then left out
    per-sample names [n, ...], n of any size: belongs to the sample and not to its tokens (images);
                     named by `ReadOptions.per_sample`, never cut, given whole to every rank that
                     holds a part of the sample
    anything else    [L, ...]: a per-token payload, an input of the model (input_ids, position
                     grids, pixel values of patches ...)

Labels and weights are shifted by one before sharding, so that a shard's last token keeps its label:
label[t] = labels[t + 1], and the last token has none. `shift=False` takes them as they stand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_dcp.errors import ConfigError, MdcpError

IGNORE = -100
_SPECIAL = ("labels", "weights", "sample_weight", "documents", "prefix", "attention_mask")


class Dataset(Protocol):
    """What the loader needs: random access and a length."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class SampleError(MdcpError):
    """A sample cannot be read or is not what the loader was told; names it by its dataset index."""


@dataclass(slots=True, kw_only=True)
class Sample:
    """One sample: inputs by name [L, ...], labels [L] int64, weights [L] float64; whole: per-sample
    fields [n, ...]. padding: how many of its last tokens are padding."""

    inputs: dict[str, Tensor]
    labels: Tensor
    weights: Tensor
    documents: tuple[int, ...] | None = None
    prefix: int | None = None
    whole: dict[str, Tensor] = field(default_factory=dict)
    padding: int = 0

    def difference(self, other: Sample) -> str | None:
        """The first field in which two readings of an item differ, or None."""
        mine = {**self.inputs, **self.whole, "labels": self.labels, "weights": self.weights}
        theirs = {**other.inputs, **other.whole, "labels": other.labels, "weights": other.weights}
        if mine.keys() != theirs.keys():
            return sorted(mine.keys() ^ theirs.keys())[0]
        for name, x in mine.items():
            same = x.shape == theirs[name].shape
            if not same or not torch.equal(x.nan_to_num(), theirs[name].nan_to_num()):
                return name
        if self.documents != other.documents:
            return "documents"
        return None if self.prefix == other.prefix else "prefix"

    @property
    def length(self) -> int:
        return int(self.labels.shape[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """tokens: name of the token ids. normalize: `token` counts every weighted token alike, `sample`
    gives every sample the same weight (its weights are divided by their sum). per_sample: names of
    fields that belong to the whole sample."""

    tokens: str = "input_ids"
    per_sample: tuple[str, ...] = ()
    shift: bool = True
    normalize: str = "token"

    def __post_init__(self) -> None:
        if self.normalize not in ("token", "sample"):
            raise ConfigError(f"normalize={self.normalize!r}: use 'token' or 'sample'")


def _tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.as_tensor(value)


def _shifted(x: Tensor, last: float) -> Tensor:
    """x[t + 1], and `last` at the end."""
    out = torch.empty_like(x)
    out[:-1] = x[1:]
    out[-1:] = last
    return out


def read_sample(dataset: Dataset, index: int, length: int, options: ReadOptions) -> Sample:
    """Read item `index` and check that it has the length that the plan counts on.

    A longer item is cut to `length` only if the loader said so (its lengths are then the clipped
    ones); see `clip_item`.
    """
    try:
        item = dataset[index]
    except Exception as error:
        raise SampleError(
            f"sample {index} cannot be read: {type(error).__name__}: {error}"
        ) from error
    try:
        return _to_sample(item, index, length, options)
    except MdcpError:
        raise
    except Exception as error:
        raise SampleError(
            f"sample {index} is not usable: {type(error).__name__}: {error}; items are 1-D token "
            "ids or mappings of per-token arrays"
        ) from error


def _to_sample(item: Any, index: int, length: int, options: ReadOptions) -> Sample:
    fields = dict(item) if isinstance(item, Mapping) else {options.tokens: item}
    whole = {k: _tensor(fields.pop(k)) for k in options.per_sample if k in fields}
    inputs = {k: _tensor(v) for k, v in fields.items() if k not in _SPECIAL}
    if not inputs:
        raise SampleError(f"sample {index} has no per-token field, only {sorted(fields)}")
    labels = _labels(fields, inputs, index, options)
    weights = _tensor(fields["weights"]) if "weights" in fields else torch.ones(len(labels))
    weights = weights.to(torch.float64)
    for name, x in {**inputs, "labels": labels, "weights": weights}.items():
        if x.dim() < 1 or x.shape[0] != length:
            raise SampleError(
                f"sample {index}: {name} has shape {tuple(x.shape)}, the loader was told a length "
                f"of {length}; every per-token field has it as first dimension (fix `lengths`, or "
                "name the field in `per_sample`)"
            )
    mask = fields.get("attention_mask")
    if mask is not None and not bool(_tensor(mask).bool().all()):
        raise SampleError(
            f"sample {index}: its attention_mask hides tokens; pass samples without padding"
        )
    if options.shift:
        labels, weights = _shifted(labels, IGNORE), _shifted(weights, 0.0)
    weights = torch.where(labels == IGNORE, 0.0, weights)
    if not bool(torch.isfinite(weights).all()) or bool((weights < 0).any()):
        raise SampleError(f"sample {index}: loss weights must be finite and not negative")
    weights = _normalized(weights, fields.get("sample_weight"), options.normalize)
    documents, prefix = fields.get("documents"), fields.get("prefix")
    return Sample(
        inputs=inputs,
        labels=labels,
        weights=weights,
        documents=None if documents is None else tuple(int(n) for n in documents),
        prefix=None if prefix is None else int(prefix),
        whole=whole,
    )


def _labels(
    fields: Mapping[str, Any], inputs: Mapping[str, Tensor], index: int, options: ReadOptions
) -> Tensor:
    if "labels" in fields:
        return _tensor(fields["labels"]).to(torch.int64)
    if options.tokens in inputs:
        return inputs[options.tokens].to(torch.int64)
    first = next(iter(inputs.values()))
    return torch.zeros(first.shape[0], dtype=torch.int64)  # no classes: the weights alone matter


def _normalized(weights: Tensor, sample_weight: Any, normalize: str) -> Tensor:
    if normalize == "sample":
        total = float(weights.sum())
        weights = weights / total if total else weights
    return weights if sample_weight is None else weights * float(sample_weight)


def clip_item(item: Any, length: int, per_sample: Sequence[str] = ()) -> Any:
    """The first `length` tokens of a dataset item; documents and prefix are cut along."""
    if not isinstance(item, Mapping):
        return item[:length]
    out: dict[str, Any] = {}
    for name, value in item.items():
        if name == "sample_weight" or name in per_sample:
            out[name] = value
        elif name == "prefix":
            out[name] = min(int(value), length)
        elif name == "documents":
            out[name] = _clip_documents(value, length)
        else:
            out[name] = value[:length]
    return out


def _clip_documents(documents: Sequence[int], length: int) -> list[int]:
    out, left = [], length
    for n in documents:
        out.append(min(int(n), left))
        left -= out[-1]
    return [n for n in out if n]


def padded_sample(sample: Sample, length: int) -> Sample:
    """The sample with copies of its last token up to `length`: without label and weight, and a
    document of their own where the sample has documents."""
    more = length - sample.length
    if not more:
        return sample
    documents = sample.documents

    def longer(x: Tensor) -> Tensor:
        return torch.cat((x, x[-1:].expand(more, *x.shape[1:])))

    return Sample(
        inputs={k: longer(x) for k, x in sample.inputs.items()},
        labels=torch.cat((sample.labels, sample.labels.new_full((more,), IGNORE))),
        weights=torch.cat((sample.weights, sample.weights.new_zeros(more))),
        documents=None if documents is None else (*documents, more),
        prefix=sample.prefix,
        whole=sample.whole,
        padding=more,
    )


def dummy_sample(sample: Sample) -> Sample:
    """The first token of a sample with weight 0. Per-sample fields stay, so that what the model
    makes of them (a vision tower) runs in a dummy as well."""
    return Sample(
        inputs={k: x[:1] for k, x in sample.inputs.items()},
        labels=sample.labels[:1],
        weights=torch.zeros(1, dtype=torch.float64),
        whole=sample.whole,
    )
