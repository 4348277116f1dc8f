"""Vision-language Transformers models: images travel with their sample.

Gradients of one step, tower and projector included, under a random plan against the stock model
sample by sample; tolerance as in test_hf.py.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

import torch

from megatron_dcp.adapters.hf import ImageSamples
from megatron_dcp.adapters.hf.data import CollatedDataset
from megatron_dcp.adapters.hf.vision import PER_SAMPLE
from megatron_dcp.errors import AdapterError
from megatron_dcp.testing.hf_models import IMAGE_TOKEN, tiny_model, tiny_vision_model
from megatron_dcp.testing.pool import WorkerPool

CASE = "megatron_dcp.testing.cases.vision:vision_case"


def check(results: list[dict[str, Any]]) -> None:
    for r in results:
        assert r["error"] <= 4e-6, (r["where"], r["error"])
        assert r["absolute"] <= 1e-6
        assert r["loss_error"] <= 5e-7
        assert r["unexpected"] == []


@pytest.mark.parametrize(
    "name",
    [
        "llava",
        "qwen2.5-vl",
        pytest.param("qwen2-vl", marks=pytest.mark.nightly),
        pytest.param("qwen3-vl", marks=pytest.mark.nightly),
    ],
)
def test_gradients_of_vision_models(pool2: WorkerPool, name: str) -> None:
    """Some samples with images are cut over both ranks; the tower gets its gradient."""
    results = pool2.run(2, CASE, name=name, seed=3)
    check(results)
    assert all(r["tower"] for r in results)
    assert any(r["cut_images"] for r in results)
    assert any(2 in r["degrees"] for r in results)


@pytest.mark.nightly
def test_vision_model_on_four_ranks_with_checkpointing(pool4: WorkerPool) -> None:
    check(pool4.run(4, CASE, name="qwen2.5-vl", seed=4, checkpointing=True))


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_every_microbatch_runs_the_tower(pool2: WorkerPool, wrapper: str) -> None:
    """Text-only microbatches and dummies too: a skipped FSDP2 unit would have no partner."""
    results = pool2.run(2, CASE, name="llava", seed=3, wrapper=wrapper, idle_rank=True)
    check(results)
    assert results[1]["dummies"]


def test_a_step_without_images(pool2: WorkerPool) -> None:
    check(pool2.run(2, CASE, name="qwen2.5-vl", seed=3, wrapper="ddp", text_only=True))


def test_a_trainers_collator_keeps_images() -> None:
    """The trainer mixin reads a sample through the collator; its images keep their shape."""
    item = {"input_ids": torch.tensor([3, IMAGE_TOKEN, IMAGE_TOKEN, 4])}

    def collate(items: list[Any]) -> dict[str, Any]:
        ids = torch.stack([x["input_ids"] for x in items])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids),
                "pixel_values": torch.ones(1, 3, 8, 8)}  # fmt: skip

    model = tiny_vision_model("llava")
    found = ImageSamples(CollatedDataset([item], collate, PER_SAMPLE), model)[0]
    assert found["pixel_values"].shape == (1, 3, 8, 8)
    assert found["mdcp_image_row"].tolist() == [-1, 0, 1, -1]
    assert found["mdcp_image_tokens"].tolist() == [2]
    with pytest.raises(AdapterError, match="'pixel_values' of the collated item"):
        CollatedDataset([item], collate)[0]


def test_placeholders_without_images_are_refused() -> None:
    items = [{"input_ids": torch.tensor([3, IMAGE_TOKEN, 4])}]
    with pytest.raises(AdapterError, match="1 image tokens"):
        ImageSamples(items, tiny_vision_model("llava"))[0]


def test_models_without_a_known_tower_are_refused() -> None:
    with pytest.raises(AdapterError, match="supported: llava"):
        ImageSamples([], tiny_model("llama"))
