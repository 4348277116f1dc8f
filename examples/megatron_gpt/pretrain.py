"""Pretrain a GPT with `megatron.training` on text of really varying length.

Every sample is a function or class of Python's `asyncio` package, in bytes, padded to --seq-length
as a fixed-shape data loader wants it. Started alone this is plain Megatron; started by
`mdcp launch` with --mdcp the padding is dropped and every step runs under a plan of its own:

    torchrun --nproc-per-node 2 -m megatron_dcp launch --allow-cpu \\
        examples/megatron_gpt/pretrain.py --mdcp $(cat examples/megatron_gpt/tiny.args)

It needs megatron-core >= 0.19 (`megatron.training` is in the wheel from there on).
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from torch import Tensor

from megatron_dcp.data.stdlib import stdlib_corpus

VOCABULARY = 256


class PaddedText(torch.utils.data.Dataset[dict[str, Tensor]]):
    """`count` samples of a corpus, clipped and padded to `width` tokens; order by seed."""

    def __init__(self, texts: list[bytes], width: int, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._order = torch.randint(0, len(texts), (max(count, 1),), generator=generator).tolist()
        self._texts, self._width = texts, width

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        text = self._texts[self._order[index]][: self._width + 1]
        tokens = torch.zeros(self._width + 1, dtype=torch.int64)
        tokens[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        weights = torch.zeros(self._width)
        weights[: len(text) - 1] = 1.0
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "loss_mask": weights,
            "position_ids": torch.arange(self._width),
        }


def datasets(counts: list[int], vp_stage: int | None = None) -> tuple[PaddedText, ...]:
    """Train, validation and test sets of the sample counts that Megatron asks for."""
    args = get_args()
    corpus = stdlib_corpus(Path(asyncio.__file__).parent)
    texts = [text for text in corpus.samples if len(text) > 1]
    return tuple(
        PaddedText(texts, args.seq_length, n or 0, args.seed + i) for i, n in enumerate(counts)
    )


def loss_func(
    loss_mask: Tensor, output_tensor: Tensor, model: Any = None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Weighted sum over tokens, the number of tokens, and both for the log."""
    weights = loss_mask.view(-1).float()
    loss = torch.sum(output_tensor.view(-1).float() * weights)
    count = weights.sum().detach().to(torch.int)
    return loss, count, {"lm loss": torch.stack([loss.detach(), count.float()])}


def forward_step(iterator: Any, model: Any) -> Any:
    """Plain Megatron's forward of one padded batch; under --mdcp the adapter's own is used."""
    if not (mpu.is_pipeline_first_stage() or mpu.is_pipeline_last_stage()):
        return model(None, None, None), partial(loss_func, None)
    batch = {k: v.cuda(non_blocking=True) for k, v in next(iterator).items()}
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(loss_func, batch["loss_mask"])


def main() -> None:
    datasets.is_distributed = True  # type: ignore[attr-defined]  # built on every rank
    args = parse_and_validate_args(
        args_defaults={"tokenizer_type": "NullTokenizer", "vocab_size": VOCABULARY - 1}
    )
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
