"""A small GPT as a user would write it: plain PyTorch, RoPE, RMSNorm, SwiGLU, grouped-query heads.

Nothing here knows of plans, ranks or groups but one call: `mdcp.attention(q, k, v)`. Tokens come
packed and padding-free: [t] ids and [t] global positions of the local shard.

Shape legend: t local tokens, H query heads, G key/value heads, D head dim, E hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megatron_dcp as mdcp
from megatron_dcp.cost import ModelShape
from megatron_dcp.cost.models import model as preset
from megatron_dcp.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class GptConfig:
    """About 1.05 million parameters with the defaults (byte tokens)."""

    vocab: int = 256
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 512
    rope_base: float = 10_000.0

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def shape(self, element_bytes: int = 4) -> ModelShape:
        """What a cost profile says of the model."""
        return ModelShape(
            layers=self.layers, heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim,
            hidden=self.hidden, vocab=self.vocab, element_bytes=element_bytes,
        )  # fmt: skip

    @classmethod
    def of(cls, name: str) -> GptConfig:
        """`small`, or the shape of a text model's preset (its MLP as SwiGLU of equal weights)."""
        if name == "small":
            return cls()
        spec = preset(name)
        if spec.pairs != "causal":
            raise ConfigError(f"model {name!r} is not a text model; use gpt-1.3b ... gpt-70b")
        return cls(
            vocab=spec.vocab, hidden=spec.hidden, layers=spec.layers, heads=spec.heads,
            kv_heads=spec.kv_heads, ffn=spec.ffn * spec.mlp_matrices // 3,
        )  # fmt: skip


def rope_tables(position_ids: Tensor, dim: int, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin [t, D/2], float32, of global positions [t]."""
    exponent = torch.arange(0, dim, 2, dtype=torch.float64, device=position_ids.device) / dim
    angles = position_ids.double()[:, None] * base**-exponent
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [t, heads, D]: the two halves of D are the rotated pairs."""
    a, b = x.chunk(2, dim=-1)
    c, s = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    return torch.cat((a * c - b * s, b * c + a * s), dim=-1)


class Block(nn.Module):
    """Pre-norm transformer layer: attention, then SwiGLU."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        e, d = config.hidden, config.head_dim
        self.attention_norm = nn.RMSNorm(e, eps=1e-6)
        self.qkv = nn.Linear(e, (config.heads + 2 * config.kv_heads) * d, bias=False)
        self.out = nn.Linear(config.heads * d, e, bias=False)
        self.mlp_norm = nn.RMSNorm(e, eps=1e-6)
        self.gate_up = nn.Linear(e, 2 * config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, e, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [t, E] -> [t, E]."""
        t = x.shape[0]
        qkv = self.qkv(self.attention_norm(x))
        split = [self.heads * self.head_dim] + [self.kv_heads * self.head_dim] * 2
        q, k, v = (y.reshape(t, -1, self.head_dim) for y in qkv.split(split, dim=-1))
        attended = mdcp.attention(rotate(q, cos, sin), rotate(k, cos, sin), v)
        x = x + self.out(attended.reshape(t, -1))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        mixed: Tensor = x + self.down(F.silu(gate) * up)
        return mixed


class Gpt(nn.Module):
    """Logits [t, V] from packed ids [t] and global positions [t]."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=1e-6)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        cos, sin = rope_tables(position_ids, self.config.head_dim, self.config.rope_base)
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum over tokens of the cross-entropy; labels [t], -100 where there is nothing to predict."""
    return F.cross_entropy(logits.float(), labels, ignore_index=-100, reduction="sum")
