"""The loop of `train.py` before megatron-dcp: DDP, one sample per microbatch.

    torchrun --nproc_per_node 2 examples/torch_minimal/stock.py

Trains a small decoder on the source files of the running interpreter's standard library, one file
per sample, byte by byte: lengths from a few bytes to the clip.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


class Files:
    """Source files as byte tokens: what a user's data set looks like, random access and lengths."""

    def __init__(self, count: int, longest: int) -> None:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = sorted(p for p in root.glob("*.py") if p.stat().st_size > 1)[:count]
        self.items = [torch.tensor(list(p.read_bytes()[:longest])) for p in files]
        self.length = [len(x) for x in self.items]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.items[index]}


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """RoPE by explicit positions: a shard's tokens need not start at 0."""
    rate = 10000.0 ** (-torch.arange(0, x.shape[-1], 2, device=x.device) / x.shape[-1])
    angle = positions[:, None, None] * rate
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.mlp = nn.Sequential(
            nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden)
        )

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).view(x.shape[0], 3, self.heads, -1).unbind(1)
        qkv = (x.transpose(0, 1) for x in (rotate(q, positions), rotate(k, positions), v))
        a = F.scaled_dot_product_attention(*qkv, is_causal=True).transpose(0, 1)
        x = x + self.out(a.flatten(1))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """input_ids, position_ids [t] -> logits [t, 256]."""

    def __init__(self, hidden: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.config = SimpleNamespace(  # what the automatic cost profile reads
            hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, vocab_size=256
        )
        self.embedding = nn.Embedding(256, hidden)
        self.layers = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.head = nn.Linear(hidden, 256)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x, position_ids)
        return self.head(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch", type=int, default=12, help="samples per step, over all ranks")
    parser.add_argument("--max-length", type=int, default=1024)
    args = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(0)
    model: nn.Module = Decoder()
    if dist.is_initialized():
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = Files(200, args.max_length)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    for index in range(args.steps):
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(index))
        for i in order[rank : args.batch : ranks].tolist():
            ids = data[i]["input_ids"]
            logits = model(ids[:-1], torch.arange(len(ids) - 1))
            loss = F.cross_entropy(logits, ids[1:]) / (args.batch // ranks)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"step {index:3d}  loss {float(loss):.4f}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
