"""Vision-language models under random plans against the stock model on one process."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
from torch import Tensor, nn

import megatron_dcp as mdcp
from megatron_dcp.adapters.hf import ImageSamples, microbatch_loss, prepare
from megatron_dcp.adapters.hf.vision import GRID, PIXELS
from megatron_dcp.testing.cases.attention import cached_world
from megatron_dcp.testing.cases.backends import random_plans
from megatron_dcp.testing.cases.hf import profile_of, whole, wrap
from megatron_dcp.testing.gradients import gradient_error
from megatron_dcp.testing.hf_models import IMAGE_TOKEN, tiny_vision_model


class Pictures:
    """Text with 0 to 2 images of varying size inside, as a processor gives them."""

    def __init__(self, count: int, seed: int, *, grid: bool) -> None:
        rng = random.Random(seed)
        g = torch.Generator().manual_seed(seed)
        self.items: list[dict[str, Tensor]] = []
        for number in range(count):
            parts = [torch.randint(3, 50, (rng.randint(1, 6),), generator=g)]
            pixels: list[Tensor] = []
            grids: list[list[int]] = []
            for _ in range(number % 3):
                h, w = (2 * rng.randint(1, 3), 2 * rng.randint(1, 2)) if grid else (4, 4)
                parts += [
                    torch.full((h * w // 4,), IMAGE_TOKEN),
                    torch.randint(3, 50, (rng.randint(1, 12),), generator=g),
                ]
                shape = (h * w, 96) if grid else (1, 3, 8, 8)
                pixels.append(torch.randn(shape, generator=g))
                grids.append([1, h, w])
            ids = torch.cat(parts)
            labels = torch.where(ids == IMAGE_TOKEN, -100, ids)
            item = {"input_ids": ids, "labels": labels}
            if pixels:
                item[PIXELS] = torch.cat(pixels)
                if grid:
                    item[GRID] = torch.tensor(grids)
            self.items.append(item)
        self.lengths = [len(item["input_ids"]) for item in self.items]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.items[index]


def vision_case(
    *,
    name: str,
    seed: int,
    wrapper: str = "bare",
    samples: int = 9,
    text_only: bool = False,
    idle_rank: bool = False,
    checkpointing: bool = False,
) -> dict[str, Any]:
    """Gradient error of one step; text_only: no sample has an image. wrapper: bare, ddp, fsdp2."""
    data = Pictures(samples, seed, grid=name != "llava")
    if text_only:
        g = torch.Generator().manual_seed(seed)
        data.lengths = [9 + i for i in range(samples)]
        data.items = [{"input_ids": torch.randint(3, 50, (n,), generator=g)} for n in data.lengths]
    stock = tiny_vision_model(name, seed=seed)
    model = copy.deepcopy(stock)
    prepared = prepare(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    images = ImageSamples(data, model)
    wrapped = wrap_vision(model, wrapper)
    engine = mdcp.initialize(
        wrapped, None, cost=profile_of(model), plan_fn=random_plans(seed, idle_rank), plan_ahead=0,
        world=cached_world(), recompute="off",
    )  # fmt: skip
    loader = engine.dataloader(
        images, global_batch_size=samples, lengths="lengths", seed=seed, batch_dim=True,
        per_sample=images.per_sample,
    )  # fmt: skip
    step = next(iter(loader))
    for mb in step:
        mb.backward(microbatch_loss(prepared, wrapped, step, mb))
    loss = step.finish()
    expected, grads = stock_step(stock, data, step.indices)
    found = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    zero = [n for n in found if n not in grads and bool(found[n].any())]
    # Softmax does not see a shift of all keys: this gradient is 0, and what is there is rounding.
    judged = {n: g for n, g in grads.items() if not n.endswith("k_proj.bias")}
    error, where = gradient_error({n: found[n] for n in judged}, judged)
    largest = max(float(g.abs().max()) for g in grads.values())
    return {
        "error": error,
        "where": where,
        "loss_error": abs(loss - expected) / abs(expected),
        "degrees": sorted({mb.placement.degree for mb in step.microbatches if not mb.dummy}),
        "dummies": sum(mb.dummy for mb in step.microbatches),
        "tower": sorted(n for n in grads if "vis" in n and bool(grads[n].any()))[:1],
        "unexpected": zero,
        "absolute": max(float((found[n] - g).abs().max()) for n, g in grads.items()) / largest,
        "cut_images": sum(
            mb.placement.degree > 1 and len(mb.inputs[PIXELS]) > 0 for mb in step.microbatches
        ),
    }


def stock_step(model: Any, data: Pictures, indices: list[int]) -> tuple[float, dict[str, Tensor]]:
    """Token-mean loss and gradients of the step by the stock model, sample by sample."""
    total: Tensor = torch.zeros(())
    weight = 0.0
    for i in indices:
        item = data[i]
        ids, labels = item["input_ids"], item.get("labels", item["input_ids"])
        extra = {n: item[n] for n in (PIXELS, GRID) if n in item}
        if GRID in extra:
            extra["mm_token_type_ids"] = (ids == IMAGE_TOKEN)[None].int()
        out = model(input_ids=ids[None], use_cache=False, **extra)
        labels = torch.cat([labels[1:], torch.tensor([-100])])
        total = total + nn.functional.cross_entropy(
            out.logits[0].float(), labels, ignore_index=-100, reduction="sum"
        )
        weight += float((labels != -100).sum())
    loss = total / max(weight, 1.0)
    torch.autograd.backward(loss)
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach()), grads


def wrap_vision(model: Any, wrapper: str) -> nn.Module:
    """As a user would: the blocks of the tower are FSDP2 units of their own. Llava's tower has a
    last norm that no image goes through, which DDP must be told."""
    if wrapper == "ddp":
        return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    if wrapper == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        kinds = ("VisionBlock", "CLIPEncoderLayer")
        blocks = [m for m in model.modules() if type(m).__name__.endswith(kinds)]
        assert blocks
        for block in blocks:
            fully_shard(block)
    return wrap(model, wrapper)
