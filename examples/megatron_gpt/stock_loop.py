"""The script of `core_loop.py` before megatron-dcp: one sample per microbatch.

    torchrun --nproc-per-node 2 examples/megatron_gpt/stock_loop.py

The stand-ins are needed where there is no GPU, with and without a plan.
"""

# ruff: noqa: E402  (the stand-ins must be in place before Megatron is imported)
from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_dcp.adapters.megatron import standins

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
if not torch.cuda.is_available():
    standins.install(training=False)  # before the first import of megatron.core

from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

VOCAB, LONGEST = 256, 128


def item(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """One sample as any loader gives it: [1, L] tensors, L really varying."""
    length = int(torch.randint(2, LONGEST, (1,), generator=generator))
    tokens = torch.randint(0, VOCAB, (1, length + 1), generator=generator)
    return {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "loss_mask": torch.ones(1, length),
        "position_ids": torch.arange(length)[None],
    }


def loss_func(
    loss_mask: torch.Tensor, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum over tokens, their number, and both for the log."""
    loss, count = (output.view(-1) * loss_mask.view(-1)).sum(), loss_mask.sum()
    return loss, count.int(), {"lm loss": torch.stack([loss.detach(), count])}


def forward_step(iterator: Any, model: Any) -> Any:
    batch = next(iterator)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(loss_func, batch["loss_mask"])


def main() -> None:
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        calculate_per_token_loss=True,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
    )
    spec = get_gpt_layer_local_spec()
    model = GPTModel(config, spec, VOCAB, LONGEST, position_embedding_type="rope")
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3), [model])
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = model.no_sync
    schedule = get_forward_backward_func()
    generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    for step in range(5):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        reports = schedule(
            forward_step_func=forward_step,
            data_iterator=iter([item(generator) for _ in range(8)]),
            model=[model],
            num_microbatches=8,
            seq_length=LONGEST,
            micro_batch_size=1,
            forward_only=False,
        )
        optimizer.step()
        total = torch.stack([r["lm loss"] for r in reports]).sum(0)
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"step {step} loss {float(total[0] / total[1]):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
