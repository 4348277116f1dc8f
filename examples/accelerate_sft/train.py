"""Supervised fine-tuning in a loop of one's own with Accelerate, under a per-step plan.

    torchrun --nproc_per_node 2 examples/accelerate_sft/train.py

A small Qwen-like model with random weights is tuned on dialogues made from files on disk; only the
answers are learned. `stock.py` is the script before.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import Qwen2Config, Qwen2ForCausalLM

from megatron_dcp.adapters.hf import initialize_accelerate, microbatch_loss, prepare


class Dialogues:
    """Question: the name of a file. Answer: its text, byte by byte. Lengths vary as files do."""

    def __init__(self, root: Path, count: int, longest: int) -> None:
        files = sorted(p for p in root.rglob("*.py") if p.stat().st_size > 1)[:count]
        self.items = [self.item(p, longest) for p in files]
        self.length = [len(x["input_ids"]) for x in self.items]

    @staticmethod
    def item(path: Path, longest: int) -> dict[str, torch.Tensor]:
        question = list(f"What is in {path.name}?\n".encode())
        answer = list(path.read_bytes()[:longest])
        labels = [-100] * len(question) + answer
        return {"input_ids": torch.tensor(question + answer), "labels": torch.tensor(labels)}

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.items[index]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "megatron_dcp")
    parser.add_argument("--samples", type=int, default=48)
    parser.add_argument("--batch", type=int, default=12, help="samples per step, over all ranks")
    parser.add_argument("--max-length", type=int, default=1024)
    args = parser.parse_args()
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    prepared = prepare(model)
    dataset = Dialogues(args.data, args.samples, args.max_length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.samples // args.batch)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    engine = initialize_accelerate(accelerator, model, optimizer, scheduler, max_grad_norm=1.0)
    loader = engine.dataloader(dataset, global_batch_size=args.batch, batch_dim=True)
    for index, step in enumerate(loader):
        for mb in step:
            mb.backward(microbatch_loss(prepared, engine.model, step, mb))
        loss = step.finish()
        accelerator.print(f"step {index}  loss {loss:.4f}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
