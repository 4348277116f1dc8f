"""A tiny decoder for gradient tests, with the attention call as a parameter."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_dcp.schemes import attention
from megatron_dcp.testing.reference import dense_attention, visible

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def rotate(x: Tensor, position_ids: Tensor) -> Tensor:
    """RoPE of x [t, heads, D] at explicit positions [t], or [t, axes] (frequencies take turns)."""
    dim = x.shape[-1]
    frequency = 100.0 ** (-torch.arange(0, dim, 2, dtype=x.dtype) / dim)
    positions = position_ids[:, None] if position_ids.dim() == 1 else position_ids
    axis = torch.arange(dim // 2) % positions.shape[1]
    angle = (positions[:, axis].to(x.dtype) * frequency)[:, None]
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


class TinyLayer(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = heads, kv_heads, hidden // heads
        self.norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, (heads + 2 * kv_heads) * self.dim)
        self.proj = nn.Linear(hidden, hidden)
        self.mlp = nn.Sequential(
            nn.LayerNorm(hidden), nn.Linear(hidden, 2 * hidden), nn.GELU(),
            nn.Linear(2 * hidden, hidden),
        )  # fmt: skip

    def forward(self, x: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        qkv = self.qkv(self.norm(x)).view(x.shape[0], -1, self.dim)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        out = attend(rotate(q, position_ids), rotate(k, position_ids), v)
        x = x + self.proj(out.reshape(x.shape[0], -1))
        out_: Tensor = x + self.mlp(x)
        return out_


class TinyModel(nn.Module):
    """Packed ids [t], positions [t] or [t, axes] -> logits [t, vocab]. Seeded, float64."""

    def __init__(
        self,
        *,
        vocab: int = 64,
        hidden: int = 32,
        layers: int = 2,
        heads: int = 4,
        kv_heads: int = 2,
        seed: int = 0,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(TinyLayer(hidden, heads, kv_heads) for _ in range(layers))
        self.head = nn.Linear(hidden, vocab)
        self.to(dtype)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, attend: Attend = attention
    ) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x, position_ids, attend)
        logits: Tensor = self.head(x)
        return logits


def weighted_loss_sum(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Sum over tokens of weight * cross-entropy."""
    losses = F.cross_entropy(logits, labels, ignore_index=-100, reduction="none")
    return (losses * weights.to(losses.dtype)).sum()


def dense_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The reference's attention: one sample, dense, causal."""
    return dense_attention(q, k, v, visible(q.shape[0]))


def narrow_gpt() -> nn.Module:
    """The reference GPT with 2 layers of width 32: fast to profile."""
    from megatron_dcp.cli.train.model import Gpt, GptConfig

    torch.manual_seed(0)
    return Gpt(GptConfig(hidden=32, layers=2, heads=4, kv_heads=2, ffn=64))
