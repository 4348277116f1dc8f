"""Vision-language models: images travel with their sample, image embeddings with their tokens.

A sample's images are a per-sample field: every rank that runs a part of the sample gets them whole,
runs the vision tower on them and keeps the embeddings of the image tokens that it holds. Gradients
of the tower are sums over embeddings, so the ranks of a block each add their part and the sum is
that of one process. The tower is run once by each rank of the block.

`ImageSamples` wraps a data set whose items have `input_ids` [L] with one placeholder per image
token, and the images as the model's processor gives them (`pixel_values` and, for the Qwen models,
`image_grid_thw`; no images: leave them out). It adds which embedding each token takes, and 3-D RoPE
positions of the whole sample where the model uses them. A microbatch without any image runs the
tower on one blank image of which no token takes anything: every microbatch goes through every
parameter, which DDP, FSDP2 and ZeRO need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_dcp.adapters.hf.attention import KEYWORD
from megatron_dcp.dispatch import Dataset
from megatron_dcp.dist import PlacementContext
from megatron_dcp.errors import AdapterError

SUPPORTED = ("llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
PIXELS, GRID = "pixel_values", "image_grid_thw"
ROW, COUNT = "mdcp_image_row", "mdcp_image_tokens"  # per token, per sample
PER_SAMPLE = (PIXELS, GRID, COUNT)


def image_model(model: Any) -> Any:
    """The module whose `get_image_features` is called, inside a supported model."""
    kind = str(getattr(model.config, "model_type", ""))
    inner = getattr(model, "model", model)
    if kind not in SUPPORTED or not hasattr(inner, "get_image_features"):
        raise AdapterError(
            f"{type(model).__name__} (model_type {kind!r}) is not a vision-language model whose "
            f"images can follow a plan; supported: {', '.join(SUPPORTED)}. Others mix image tokens "
            "in ways that depend on the whole sequence; train them on text, or give image "
            "embeddings as a per-token field to a model of your own"
        )
    return inner


class ImageSamples:
    """`dataset` with what image tokens need; see the module docstring. Give the loader
    `per_sample=samples.per_sample`."""

    def __init__(self, dataset: Dataset, model: Any) -> None:
        self.dataset = dataset
        self.config = model.config
        self.inner = image_model(model)
        self.grid = self.config.model_type != "llava"
        self.per_sample = PER_SAMPLE if self.grid else (PIXELS, COUNT)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # not yet set: a copy is being made
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitem__(self, index: int) -> dict[str, Any]:
        out = dict(self.dataset[index])
        ids = torch.as_tensor(out["input_ids"])
        held = ids == int(self.config.image_token_id)
        images = out.get(PIXELS)
        out[PIXELS] = no_images(self.config) if images is None else torch.as_tensor(images)
        if self.grid:
            found = out.get(GRID)
            none = torch.zeros(0, 3, dtype=torch.int64)
            out[GRID] = none if found is None else torch.as_tensor(found)
        if bool(held.any()) != bool(len(out[PIXELS])):
            raise AdapterError(
                f"sample {index} has {int(held.sum())} image tokens (id "
                f"{self.config.image_token_id}) and {PIXELS} of {tuple(out[PIXELS].shape)}; the "
                "processor puts one placeholder per image embedding into input_ids"
            )
        out[ROW] = torch.where(held, held.cumsum(0) - 1, -1)
        out[COUNT] = held.sum()[None]
        out.pop("mm_token_type_ids", None)
        if self.grid and "position_ids" not in out:
            out["position_ids"] = self._positions(ids, held, out[GRID])
        return out

    def _positions(self, ids: Tensor, held: Tensor, grid: Tensor) -> Tensor:
        """Time, height and width of every token of the sample, [L, 3]."""
        if not bool(held.any()):
            return torch.arange(len(ids))[:, None].expand(-1, 3).contiguous()
        found, _ = self.inner.get_rope_index(
            ids[None], mm_token_type_ids=held[None].int(), image_grid_thw=grid
        )
        return torch.as_tensor(found[:, 0].T).contiguous()


def no_images(config: Any) -> Tensor:
    """`pixel_values` of a sample without images: no rows, of the model's row shape."""
    vision = config.vision_config
    if config.model_type == "llava":
        size = int(vision.image_size)
        return torch.zeros(0, int(getattr(vision, "num_channels", 3)), size, size)
    channels = int(getattr(vision, "in_channels", 3))
    return torch.zeros(0, channels * int(vision.temporal_patch_size) * int(vision.patch_size) ** 2)


def blank_image(config: Any, pixels: Tensor) -> dict[str, Tensor]:
    """The smallest image that the tower takes, all zeros."""
    if config.model_type == "llava":
        return {PIXELS: pixels.new_zeros(1, *pixels.shape[1:])}
    merge = int(config.vision_config.spatial_merge_size)
    grid = torch.tensor([[1, merge, merge]], device=pixels.device)
    return {PIXELS: pixels.new_zeros(merge * merge, *pixels.shape[1:]), GRID: grid}


class ImageRows:
    """Stands in for `get_image_features`: gives the embeddings of the rows that are set."""

    def __init__(self, inner: Any) -> None:
        self.stock: Callable[..., Any] = inner.get_image_features
        self.rows: Tensor | None = None
        self.expected = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.rows is None:
            return self.stock(*args, **kwargs)
        kwargs.pop(KEYWORD, None)  # the tower's attention is not the plan's
        out = self.stock(*args, **kwargs)
        out.pooler_output = (self._taken(out.pooler_output),)
        deep = getattr(out, "deepstack_features", None)
        if deep is not None:
            out.deepstack_features = [(self._taken(layer),) for layer in deep]
        return out

    def _taken(self, images: Any) -> Tensor:
        """Embeddings of the local tokens [n, C] out of those of every image."""
        embeddings = torch.cat(list(images))
        if self.expected and len(embeddings) != self.expected:
            raise AdapterError(
                f"the vision tower gave {len(embeddings)} embeddings, the samples of the "
                f"microbatch have {self.expected} image tokens; the processor's placeholders do "
                "not fit the images"
            )
        assert self.rows is not None
        return embeddings[self.rows]


def follow_images(model: Any) -> ImageRows | None:
    """Install `ImageRows` in a supported vision-language model; None for any other."""
    if str(getattr(model.config, "model_type", "")) not in SUPPORTED:
        return None
    inner = image_model(model)
    if not isinstance(inner.get_image_features, ImageRows):
        inner.get_image_features = ImageRows(inner)
    found: ImageRows = inner.get_image_features
    return found


def image_inputs(
    images: ImageRows, config: Any, inputs: Mapping[str, Tensor], ctx: PlacementContext
) -> dict[str, Tensor]:
    """The model's keyword arguments of a microbatch, and `images.rows` set for its forward.

    Token t of sample j takes embedding `row[t]` of its sample: that many after those of the
    samples before.
    """
    out = dict(inputs)
    counts = out.pop(COUNT)
    row = out.pop(ROW).reshape(-1)
    spans = ctx.shards.ranks[ctx.block_rank]
    samples = [s.sample for s in spans for _ in range(s.stop - s.start)] or [0]
    first = torch.cumsum(counts, 0) - counts
    at = first[torch.tensor(samples, device=row.device)[: len(row)]] + row
    images.rows = at[row >= 0]
    images.expected = int(counts.sum())
    if not len(out[PIXELS]):
        out |= blank_image(config, out[PIXELS])
    positions = out["position_ids"]
    if positions.dim() == 3:  # [1, t, 3] -> [3, 1, t]
        out["position_ids"] = positions.permute(2, 0, 1)
    return out
