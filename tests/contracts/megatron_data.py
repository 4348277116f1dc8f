"""Megatron's own data sets on files of a test: indexed documents (.bin/.idx) and SFT conversations.

Each builder gives the items that a data iterator of Megatron yields: collated batches of one row.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dcp.adapters.megatron.samples import Splitter

ROW = 48
EOD = 95  # the last id of a vocabulary of 96
WORDS = 90


def documents(count: int = 60) -> list[list[int]]:
    """Documents of very different lengths, each ended by EOD."""
    rng = random.Random(11)
    out = []
    for _ in range(count):
        n = min(70, max(1, int(math.exp(rng.gauss(2.2, 0.9)))))
        out.append([*(rng.randrange(WORDS) for _ in range(n)), EOD])
    return out


def _once(folder: Path, name: str, make: Any) -> Path:
    """`folder/name`, made by the first rank."""
    if dist.get_rank() == 0 and not (folder / (name + ".made")).exists():
        make(folder / name)
        (folder / (name + ".made")).touch()
    dist.barrier()
    return folder / name


def _write_indexed(prefix: Path) -> None:
    import numpy
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.int32)
    for document in documents():
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(f"{prefix}.idx")


def indexed(folder: str, samples: int) -> Any:
    """GPTDataset over a .bin/.idx pair, positions starting anew with each document."""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer

    class Tokenizer(NullTokenizer):
        """0.16's has neither `eod` nor what names the cache of its indices."""

        unique_identifiers = {"class": "null", "vocab_size": EOD + 1}  # noqa: RUF012
        eod, pad = EOD, -1

    prefix = _once(Path(folder), "documents", _write_indexed)
    config = GPTDatasetConfig(
        random_seed=1, sequence_length=ROW, blend=([str(prefix)], None), split="1,0,0",
        path_to_cache=str(Path(folder) / "cache"), tokenizer=Tokenizer(EOD + 1),
        reset_position_ids=True, reset_attention_mask=False, eod_mask_loss=True,
        create_attention_mask=False, mid_level_dataset_surplus=0.005,
    )  # fmt: skip
    sizes = [samples, 0, 0]
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[0]


def _write_chats(path: Path) -> None:
    rng = random.Random(5)

    def text(mean: float) -> str:
        n = min(30, max(1, int(math.exp(rng.gauss(mean, 0.8)))))
        return " ".join(f"w{rng.randrange(WORDS)}" for _ in range(n))

    lines = []
    for _ in range(40):
        messages = []
        for _ in range(rng.randint(1, 3)):
            messages += [
                {"role": "system", "content": text(0.5)},
                {"role": "user", "content": text(1.0)},
                {"role": "assistant", "content": text(1.8)},
            ]
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(lines) + "\n")


def _write_tokenizer(folder: Path) -> None:
    """A word-level Hugging Face tokenizer with a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(WORDS)}
    words |= {"<unk>": WORDS, "<pad>": WORDS + 1, "<eos>": WORDS + 2}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>"
    )
    made.chat_template = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
    made.save_pretrained(str(folder))


def chats(folder: str, samples: int) -> Any:
    """SFTDataset over a JSON-lines file of conversations, several packed into a row."""
    import numpy
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
    from megatron.core.datasets.utils import Split
    from megatron.core.tokenizers.text.libraries.sft_tokenizer import SFTTokenizer
    from megatron.training.datasets.sft_dataset import SFTDataset

    path = _once(Path(folder), "chats.jsonl", _write_chats)
    tokenizer = SFTTokenizer(str(_once(Path(folder), "tokenizer", _write_tokenizer)), "default")

    class Tokenizer:
        """SFTDataset asks for `eod` and `pad`, the library calls them otherwise."""

        unique_identifiers = {"class": "sft"}  # noqa: RUF012
        vocab_size, eod, pad = EOD + 1, tokenizer.eod, tokenizer.pad_id
        tokenize_conversation = staticmethod(tokenizer.tokenize_conversation)

    config = GPTDatasetConfig(
        random_seed=1, sequence_length=ROW, blend=([str(path)], None), split="1,0,0",
        tokenizer=Tokenizer(), reset_position_ids=False, reset_attention_mask=False,
        eod_mask_loss=False, create_attention_mask=False, context_parallel_size=1,
    )  # fmt: skip
    low = SFTDataset.build_low_level_dataset(str(path), config)
    return SFTDataset(low, str(path), numpy.arange(len(low)), samples, Split.train, config)


def splitter(kind: str) -> Splitter:
    """How `mdcp launch` would cut the rows of a data set into samples."""
    if kind == "indexed":
        return Splitter(split="documents", eod=EOD, restarts=True)
    return Splitter()


def sources(kind: str, dataset: Any) -> list[list[int]]:
    """The token lists that no sample may reach across: documents or conversations."""
    if kind == "indexed":
        return documents()
    low, tokenize = dataset.dataset, dataset.config.tokenizer.tokenize_conversation
    return [
        tokenize(c, return_target=False, add_generation_prompt=False).tolist()
        for i in range(len(low))
        for c in dataset._split_conversations(low[i])
    ]


def stays_inside(tokens: list[int], of: list[list[int]]) -> bool:
    """Whether the tokens are a piece of one source."""
    piece = f" {' '.join(map(str, tokens))} "
    return any(piece in f" {' '.join(map(str, source))} " for source in of)


def collated(item: dict[str, Any]) -> dict[str, Tensor]:
    """One row as Megatron's loader gives it."""
    batch: dict[str, Tensor] = torch.utils.data.default_collate([item])
    return batch
