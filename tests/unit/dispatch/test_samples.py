"""Samples: shifting, masks, weights, clipping, and errors that name the sample."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megatron_dcp.dispatch import (
    ReadOptions,
    Sample,
    SampleError,
    clip_item,
    dummy_sample,
    padded_sample,
    read_sample,
)
from megatron_dcp.errors import ConfigError


def read(item: Any, length: int, **options: Any) -> Sample:
    return read_sample([item], 0, length, ReadOptions(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize("item", [[5, 6, 7], np.array([5, 6, 7]), torch.tensor([5, 6, 7])])
def test_token_ids_are_their_own_labels_shifted_by_one(item: Any) -> None:
    sample = read(item, 3)
    assert sample.inputs["input_ids"].tolist() == [5, 6, 7]
    assert sample.labels.tolist() == [6, 7, -100]
    assert sample.weights.tolist() == [1.0, 1.0, 0.0]


def test_given_labels_and_weights_are_shifted_together() -> None:
    item = {"input_ids": [1, 2, 3, 4], "labels": [-100, 2, -100, 4], "weights": [9, 2, 3, 0.5]}
    sample = read(item, 4)
    assert sample.labels.tolist() == [2, -100, 4, -100]
    assert sample.weights.tolist() == [2.0, 0.0, 0.5, 0.0]
    as_is = read(item, 4, shift=False)
    assert as_is.labels.tolist() == [-100, 2, -100, 4]
    assert as_is.weights.tolist() == [0.0, 2.0, 0.0, 0.5]


def test_sample_normalization_gives_each_sample_weight_one() -> None:
    sample = read({"input_ids": list(range(5)), "sample_weight": 3.0}, 5, normalize="sample")
    assert float(sample.weights.sum()) == pytest.approx(3.0)
    masked = read({"input_ids": [1, 2], "labels": [-100, -100]}, 2, normalize="sample")
    assert float(masked.weights.sum()) == 0.0


def test_a_sample_of_one_token_has_no_label() -> None:
    assert read([3], 1).labels.tolist() == [-100]


def test_a_padded_sample_is_refused_and_a_full_mask_is_dropped() -> None:
    assert set(read({"input_ids": [1, 2], "attention_mask": [1, 1]}, 2).inputs) == {"input_ids"}
    with pytest.raises(SampleError, match="without padding"):
        read({"input_ids": [1, 2], "attention_mask": [1, 0]}, 2)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ([1, 2], "has shape .2,., the loader was told a length of 3"),
        ({"labels": [1, 2, 3]}, "no per-token field"),
        ({"input_ids": [1, 2, 3], "weights": [1, -1, 1]}, "finite and not negative"),
        ({"input_ids": [1, 2, 3], "weights": [1, float("nan"), 1]}, "finite and not negative"),
        ("text", "not usable"),
    ],
)
def test_faults_name_the_sample(item: Any, message: str) -> None:
    with pytest.raises(SampleError, match=message) as caught:
        read(item, 3)
    assert "sample 0" in str(caught.value)


def test_clipping_cuts_documents_and_prefix_along() -> None:
    item = {"input_ids": torch.arange(9), "documents": [4, 3, 2], "prefix": 8, "sample_weight": 2.0}
    cut = clip_item(item, 5)
    assert (len(cut["input_ids"]), cut["documents"], cut["prefix"]) == (5, [4, 1], 5)
    assert cut["sample_weight"] == 2.0


def test_unknown_normalization() -> None:
    with pytest.raises(ConfigError, match="normalize"):
        ReadOptions(normalize="batch")


def test_per_sample_fields_are_neither_checked_nor_cut() -> None:
    item = {"input_ids": [1, 2, 3, 4], "images": torch.ones(2, 3)}
    sample = read(item, 4, per_sample=("images",))
    assert list(sample.inputs) == ["input_ids"]
    assert sample.whole["images"].shape == (2, 3)
    assert dummy_sample(sample).whole["images"].shape == (2, 3)
    cut = clip_item(item, 1, ("images",))
    assert cut["images"].shape == (2, 3)
    assert cut["input_ids"] == [1]
    with pytest.raises(SampleError, match="name the field in `per_sample`"):
        read(item, 4)


def test_padding_has_no_label_and_no_weight() -> None:
    item = {
        "input_ids": [5, 6, 7],
        "grid": torch.ones(3, 2),
        "documents": [2, 1],
        "prefix": 1,
        "sample_weight": 2.0,
    }
    sample = read(item, 3, normalize="sample")
    padded = padded_sample(sample, 8)
    assert padded.length == 8
    assert padded.padding == 5
    assert padded.inputs["input_ids"].tolist() == [5, 6, 7, 7, 7, 7, 7, 7]
    assert padded.inputs["grid"].shape == (8, 2)
    assert padded.labels.tolist() == [6, 7, *[-100] * 6]
    assert padded.weights.tolist() == [*sample.weights.tolist(), *[0.0] * 5]
    assert (padded.documents, padded.prefix) == ((2, 1, 5), 1)
    assert padded_sample(sample, 3) is sample
    assert dummy_sample(padded).padding == 0
