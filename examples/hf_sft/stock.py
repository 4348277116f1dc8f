"""The script of `train.py` before megatron-dcp: TRL's SFTTrainer as it comes.

    torchrun --nproc_per_node 2 examples/hf_sft/stock.py            # all weights
    torchrun --nproc_per_node 2 examples/hf_sft/stock.py --lora

A small Qwen-like model with random weights and a byte tokenizer, both made here (nothing is
downloaded), is tuned on dialogues made from files on disk.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import SFTConfig, SFTTrainer

TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """256 bytes and four special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<|pad|>", eos_token="<|end|>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
    )  # fmt: skip
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def dialogues(root: Path, count: int, longest: int) -> Dataset:
    """One dialogue per file: what is in it, and its text."""
    files = sorted(p for p in root.rglob("*.py") if p.stat().st_size > 1)[:count]
    return Dataset.from_list(
        [
            {
                "messages": [
                    {"role": "user", "content": f"What is in {p.name}?"},
                    {"role": "assistant", "content": p.read_text()[:longest]},
                ]
            }
            for p in files
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lora", action="store_true", help="train low-rank adapters only")
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "megatron_dcp")
    parser.add_argument("--samples", type=int, default=48)
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    trainer = SFTTrainer(
        model=Qwen2ForCausalLM(config),
        args=SFTConfig(
            output_dir=args.out or tempfile.mkdtemp(), per_device_train_batch_size=4,
            num_train_epochs=1, learning_rate=1e-3, logging_steps=1, save_strategy="no",
            report_to="none", use_cpu=not torch.cuda.is_available(), bf16=False,
            max_length=args.max_length, disable_tqdm=True, dataloader_pin_memory=False,
        ),
        train_dataset=dialogues(args.data, args.samples, args.max_length),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8, target_modules="all-linear") if args.lora else None,
    )  # fmt: skip
    trainer.train()


if __name__ == "__main__":
    main()
