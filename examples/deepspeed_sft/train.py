"""Supervised fine-tuning with DeepSpeed: a stock config with one section added.

    DS_ACCELERATOR=cpu torchrun --nproc_per_node 2 examples/deepspeed_sft/train.py

A small Qwen-like model with random weights is tuned on dialogues made from files on disk; only the
answers are learned. `ds_config.json` is a usual one (ZeRO-2 here, any stage works) with the section
`megatron_dcp`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from megatron_dcp.adapters.deepspeed import initialize
from megatron_dcp.adapters.hf import microbatch_loss, prepare

HERE = Path(__file__).parent


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
    parser.add_argument("--config", default=str(HERE / "ds_config.json"))
    parser.add_argument("--data", type=Path, default=HERE.parents[1] / "megatron_dcp")
    parser.add_argument("--samples", type=int, default=48)
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--local_rank", type=int, default=0, help="set by the deepspeed launcher")
    args = parser.parse_args()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = Qwen2ForCausalLM._from_config(config, attn_implementation="sdpa")
    prepared = prepare(model)
    engine, loader = initialize(
        model=model,
        model_parameters=model.parameters(),
        training_data=Dialogues(args.data, args.samples, args.max_length),
        config=args.config,
    )
    for index, step in enumerate(loader):
        for mb in step:
            mb.backward(microbatch_loss(prepared, engine.model, step, mb))
        loss = step.finish()
        if torch.distributed.get_rank() == 0:
            print(f"step {index}  loss {float(loss):.4f}", flush=True)


if __name__ == "__main__":
    main()
