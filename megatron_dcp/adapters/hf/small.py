"""A small Llama with random weights, its cost in one pack, and a Trainer for it.

What `mdcp bench end-to-end --trainer hf` trains.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from megatron_dcp.adapters.hf.options import TrainerOptions
from megatron_dcp.adapters.hf.prepare import forward_losses, prepare
from megatron_dcp.adapters.hf.turns import SteppedTrainer, TrainerTurns
from megatron_dcp.cost import ModelShape
from megatron_dcp.dist import PlacementContext, use_placement

VERSION = str(transformers.__version__)


def small_llama(shape: ModelShape, ffn: int, *, seed: int) -> LlamaForCausalLM:
    """A Llama of a shape, weights drawn with `seed`."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=ffn,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, max_position_embeddings=1 << 20,
        bos_token_id=0, eos_token_id=0, pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def run_pack(model: Any, context: PlacementContext) -> None:
    """Forward and backward of one rank's share of a placement, on random tokens."""
    ids = torch.randint(0, model.config.vocab_size, (1, context.rows))
    inputs = {"input_ids": ids, "position_ids": context.position_ids[None]}
    with use_placement(context):
        losses, _ = forward_losses(prepare(model), model, inputs, ids, context)
        torch.autograd.backward(losses.sum())
    model.zero_grad(set_to_none=True)


class Bytes(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples as a Trainer's data set: a fixed selection of a corpus, in a drawn order."""

    def __init__(self, corpus: Any, count: int, seed: int) -> None:
        self.corpus = corpus
        self.chosen = np.random.default_rng(seed).permutation(len(corpus))[:count]

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.from_numpy(self.corpus[int(self.chosen[index])])
        return {"input_ids": ids, "labels": ids}


def collate(items: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """One item at a time: nothing to pad."""
    return {name: torch.stack([x[name] for x in items]) for name in items[0]}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerJob:
    """A run of the Trainer. global_batch: samples of a step, over all ranks."""

    data: Bytes
    ranks: int
    global_batch: int
    seed: int
    lr: float
    bytes_per_s: float | None
    options: TrainerOptions


def contender(name: str, model: Any, job: TrainerJob) -> TrainerTurns:
    """A Trainer of its own for a model, one step at a time."""
    folder = tempfile.TemporaryDirectory(prefix="mdcp-bench-")  # a Trainer insists on one
    arguments = TrainingArguments(
        output_dir=folder.name,
        per_device_train_batch_size=job.global_batch // job.ranks, num_train_epochs=1,
        learning_rate=job.lr, lr_scheduler_type="constant", optim="adamw_torch", weight_decay=0.1,
        max_grad_norm=0.0, logging_strategy="no", save_strategy="no", report_to="none",
        use_cpu=not torch.cuda.is_available(), bf16=False, seed=job.seed, disable_tqdm=True,
        dataloader_pin_memory=False, ddp_backend="gloo",
        ddp_find_unused_parameters=False,
    )  # fmt: skip
    trainer = SteppedTrainer(
        model=model, args=arguments, train_dataset=job.data, data_collator=collate,
        mdcp=job.options, bytes_per_s=job.bytes_per_s,
    )  # fmt: skip
    return TrainerTurns(name, trainer, folder)
