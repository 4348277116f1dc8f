"""A small video diffusion transformer, 1-D or 2-D, on packed clips and images of any size.

* 1-D: every block attends over the whole clip. 2-D: blocks attend inside frames and along pixels
  in turn; the rows of the pack are switched between the two (`mdcp.switch_rows`).
* Conditions: the timestep and the caption's mean by adaLN-zero (Peebles and Xie, 2023), the words
  of the caption by cross-attention.
* Positions: rotary over (frame, row, column), from the positions that come with the tokens.
* Loss: rectified flow (Liu et al., 2023): the velocity from data to noise at a random time.

Nothing here knows of ranks or plans. All that follows the plan is in `Planned`; noise, timestep and
dropped captions are keyed by sample, so that they are the same on every rank and under every plan.

Shape legend: t rows of this rank, B samples of the microbatch, E hidden, H heads, D head dim, F
features of a patch, W words of a caption.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megatron_dcp as mdcp
from megatron_dcp.ops import varlen_attention

NOISE, TIME, CAPTION = range(3)  # sites of the random numbers
NO_WORD = 0  # padding, and every word of a dropped caption
AXES = ("space", "time")


@dataclass(frozen=True, slots=True, kw_only=True)
class DitConfig:
    """grid: `1d` (full attention) or `2d` (spatial then temporal). features: of one patch."""

    grid: Literal["1d", "2d"] = "2d"
    features: int = 48
    hidden: int = 96
    layers: int = 4
    heads: int = 4
    ffn: int = 384
    vocabulary: int = 256
    rope_base: float = 100.0

    # What cost="auto" reads of a model.
    @property
    def hidden_size(self) -> int:
        return self.hidden

    @property
    def num_hidden_layers(self) -> int:
        return self.layers

    @property
    def num_attention_heads(self) -> int:
        return self.heads

    @property
    def intermediate_size(self) -> int:
        return self.ffn

    @property
    def vocab_size(self) -> int:
        return self.features  # outputs of a token

    hidden_act = "gelu"

    @property
    def attention_pairs(self) -> str:
        return "full" if self.grid == "1d" else "grid"


class Planned:
    """The calls by which the model follows the plan."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, axis: str | None) -> Tensor:
        """q, k, v [t, H, D], over the clip (None), inside frames or along pixels."""
        return mdcp.attention(q, k, v, causal=False, axis=axis, rows=axis or "own")

    def switch(self, x: Tensor, source: str, target: str) -> Tensor:
        """Rows of one layout as rows of another."""
        return mdcp.switch_rows(x, source=source, target=target)

    def sample_index(self, layout: str) -> Tensor:
        """[t]: which sample of the microbatch each row of a layout belongs to."""
        return mdcp.grid_rows(layout).sample_index


class Rope(nn.Module):
    """Rotation angles [t, D / 2] of positions [t, 3]: pairs of D go round over the three axes."""

    def __init__(self, config: DitConfig) -> None:
        super().__init__()
        pairs = config.hidden // config.heads // 2
        axis = torch.arange(pairs) % 3
        rate = config.rope_base ** -((torch.arange(pairs) // 3) / max(1, pairs // 3))
        self.register_buffer("axis", axis, persistent=False)
        self.register_buffer("rate", rate, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angle = positions[:, self.axis].to(self.rate.dtype) * self.rate
        return angle.cos()[:, None], angle.sin()[:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [t, H, D] by angles [t, 1, D / 2]; the halves of D are the rotated pairs."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift


class Block(nn.Module):
    """Attention, cross-attention to the caption, MLP; the first and last under adaLN-zero."""

    def __init__(self, config: DitConfig) -> None:
        super().__init__()
        e = config.hidden
        self.heads, self.dim = config.heads, e // config.heads
        self.modulation = nn.Linear(e, 6 * e)
        self.qkv, self.out = nn.Linear(e, 3 * e), nn.Linear(e, e)
        self.query, self.key_value = nn.Linear(e, e), nn.Linear(e, 2 * e)
        self.cross_out = nn.Linear(e, e)
        self.mlp = nn.Sequential(nn.Linear(e, config.ffn), nn.GELU(), nn.Linear(config.ffn, e))

    def forward(
        self,
        x: Tensor,
        condition: Tensor,
        words: Tensor,
        index: Tensor,
        angles: tuple[Tensor, Tensor],
        calls: Planned,
        axis: str | None,
    ) -> Tensor:
        """x [t, E], condition [B, E], words [B, W, E], index [t] -> [t, E]."""
        t, e = x.shape
        m = self.modulation(F.silu(condition)).index_select(0, index).chunk(6, dim=-1)
        qkv = self.qkv(modulated(x, m[0], m[1])).view(t, 3, self.heads, self.dim)
        q, k, v = qkv.unbind(1)
        attended = calls.attend(rotate(q, *angles), rotate(k, *angles), v, axis)
        x = x + m[2] * self.out(attended.reshape(t, e))
        x = x + self.cross_out(self._cross(x, words, index))
        return x + m[5] * self.mlp(modulated(x, m[3], m[4]))

    def _cross(self, x: Tensor, words: Tensor, index: Tensor) -> Tensor:
        """Every row attends to the words of its own sample; rows of a sample stand together."""
        samples, count, e = words.shape
        q = self.query(F.layer_norm(x, (e,))).view(len(x), self.heads, self.dim)
        kv = self.key_value(words).view(samples * count, 2, self.heads, self.dim)
        rows = torch.bincount(index, minlength=samples).cumsum(0)
        cu_rows = F.pad(rows, (1, 0)).to(torch.int32)
        cu_words = torch.arange(0, samples * count + 1, count, dtype=torch.int32, device=x.device)
        out, _ = varlen_attention(q, kv[:, 0], kv[:, 1], cu_rows, cu_words, causal=False)
        return out.reshape(len(x), e)


class VideoDit(nn.Module):
    """Velocity [t, F] of noisy patches [t, F]."""

    def __init__(self, config: DitConfig, calls: Planned | None = None) -> None:
        super().__init__()
        self.config, self.calls = config, calls or Planned()
        e = config.hidden
        self.patch = nn.Linear(config.features, e)
        self.time = nn.Sequential(nn.Linear(e, e), nn.SiLU(), nn.Linear(e, e))
        self.words = nn.Embedding(config.vocabulary, e)
        self.rope = Rope(config)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.modulation = nn.Linear(e, 2 * e)
        self.head = nn.Linear(e, config.features)
        for block in self.layers:  # adaLN-zero: every block begins as the identity
            nn.init.zeros_(block.modulation.weight)
            nn.init.zeros_(block.modulation.bias)
            nn.init.zeros_(block.cross_out.weight)
        nn.init.zeros_(self.head.weight)

    def forward(
        self, noisy: Tensor, time: Tensor, caption: Tensor, grid: Tensor, sample_index: Tensor
    ) -> Tensor:
        """noisy [t, F]; time [B] in (0, 1); caption [B, W] int64; grid [t, 3] int64: frame, row and
        column of each patch; sample_index [t]."""
        words = self.words(caption)
        condition = self.time(sinusoid(time, self.config.hidden)) + words.mean(dim=1)
        x = self.patch(noisy)
        if self.config.grid == "1d":
            angles = self.rope(grid)
            for block in self.layers:
                x = block(x, condition, words, sample_index, angles, self.calls, None)
        else:
            x = self._over_the_grid(x, condition, words, grid)
        shift, scale = self.modulation(F.silu(condition))[sample_index].chunk(2, dim=-1)
        return self.head(modulated(x, shift, scale))

    def _over_the_grid(self, x: Tensor, condition: Tensor, words: Tensor, grid: Tensor) -> Tensor:
        """Blocks inside frames and along pixels in turn; the rows move between them."""
        calls, at = self.calls, "own"
        index = {axis: calls.sample_index(axis) for axis in AXES}
        angles = {axis: self.rope(calls.switch(grid, "own", axis)) for axis in AXES}
        for i, block in enumerate(self.layers):
            axis = AXES[i % 2]
            x = calls.switch(x, at, axis)
            x = block(x, condition, words, index[axis], angles[axis], calls, axis)
            at = axis
        return calls.switch(x, at, "own")


def sinusoid(time: Tensor, width: int) -> Tensor:
    """[B] in (0, 1) -> [B, width]."""
    rate = 1000.0 ** -(torch.arange(0, width, 2, dtype=time.dtype, device=time.device) / width)
    angle = 1000.0 * time[:, None] * rate
    return torch.cat((angle.cos(), angle.sin()), dim=-1)


def flow_loss_sum(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    weights: Tensor,
    *,
    seed: int,
    drop_caption: float = 0.1,
) -> Tensor:
    """Rectified-flow loss of the current microbatch, summed over its rows with their weights.

    inputs: patches [t, F], grid [t, 3], caption [B, W]. Noise is drawn per sample, position and
    feature, time and dropped captions per sample, all anew in every step.
    """
    clean, index = inputs["patches"], mdcp.grid_rows("own").sample_index
    noise = mdcp.sample_generator(seed=seed, site=NOISE).normal(clean.shape[1], dtype=clean.dtype)
    time = mdcp.sample_generator(seed=seed, site=TIME).of_samples(dtype=clean.dtype)[:, 0]
    dropped = mdcp.sample_generator(seed=seed, site=CAPTION).of_samples() < drop_caption
    caption = torch.where(dropped, NO_WORD, inputs["caption"])
    share = time[index, None]
    noisy = (1 - share) * clean + share * noise
    velocity = model(noisy, time, caption, inputs["grid"], index)
    error = (velocity.to(clean.dtype) - (noise - clean)).square().mean(dim=-1)
    return (error * weights).sum()
