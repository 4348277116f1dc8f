"""Clips and images that this example renders itself: captioned shapes that move over a ground.

Sizes follow the Open-Sora grid (five resolutions; images of 1 frame and videos of 51 to 408) with
Zipf-drawn buckets, as `mdcp simulate --lengths preset:video-short` and its kin draw them, divided
by `shrink` in every direction so that a CPU can train on them. `bucketed` takes the grid's own
sizes, `native` lets height, width and frames of every clip differ: nothing is cropped or padded.

A clip is a function of (seed, index) alone: every rank renders only what it runs.

Shape legend: L = frames * rows * columns patches of a clip, F = 3 * patch * patch features.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_dcp.data.generators import generate

PATCH = 4  # pixels
COLOURS = {
    "red": (1.0, -0.6, -0.6), "green": (-0.6, 0.8, -0.6), "blue": (-0.6, -0.5, 1.0),
    "yellow": (0.9, 0.9, -0.7), "white": (1.0, 1.0, 1.0), "black": (-1.0, -1.0, -1.0),
}  # fmt: skip
SHAPES = ("disc", "square", "diamond", "ring")
MOVES = {"still": (0, 0), "left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
SPEEDS = {"slowly": 0.25, "fast": 0.75}
WORDS = ("", *COLOURS, *SHAPES, *MOVES, *SPEEDS, "on")  # word 0 is no word
CAPTION_WORDS = 8


def patches(frames: NDArray[np.floating], patch: int = PATCH) -> torch.Tensor:
    """[frames, height, width, 3] -> [L, F] float32, patch by patch, frame after frame."""
    f, h, w, _ = frames.shape
    x = frames.reshape(f, h // patch, patch, w // patch, patch, 3).transpose(0, 1, 3, 2, 4, 5)
    return torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32).reshape(-1, 3 * patch**2))


def positions(shape: tuple[int, int, int]) -> torch.Tensor:
    """[L, 3] int64: frame, row and column of every patch."""
    return torch.cartesian_prod(*(torch.arange(n) for n in shape)).view(-1, 3)


def padded(words: list[int]) -> torch.Tensor:
    """Word ids as a caption [1, CAPTION_WORDS], 0 where there is none."""
    return torch.tensor([(words + [0] * CAPTION_WORDS)[:CAPTION_WORDS]])


class RenderedClips:
    """What the engine's data loader needs: random access, lengths and shapes.

    preset: `video-short`, `video-balanced` or `video-long`. images_per_video: how many images join
    each video. Items: patches [L, F], grid [L, 3], and the sample's caption [1, CAPTION_WORDS].
    """

    def __init__(
        self,
        count: int,
        *,
        preset: str = "video-short",
        sizes: Literal["native", "bucketed"] = "native",
        shrink: int = 4,
        images_per_video: float = 3.0,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.seed, self.dtype = seed, dtype
        drawn = generate(preset, count, seed, images_per_video=images_per_video).shapes
        assert drawn is not None
        self.shapes = [self._size(i, s, sizes, shrink) for i, s in enumerate(drawn)]
        self.lengths = [math.prod(s) for s in self.shapes]

    def _size(
        self, index: int, bucket: tuple[int, int, int], sizes: str, shrink: int
    ) -> tuple[int, int, int]:
        factors = np.ones(3)
        if sizes == "native":
            factors = np.random.default_rng([self.seed, index, 1]).uniform(0.7, 1.0, 3)
        f, h, w = (max(1, math.ceil(n * x / shrink)) for n, x in zip(bucket, factors, strict=True))
        return (1 if bucket[0] == 1 else max(2, f), h, w)

    def __len__(self) -> int:
        return len(self.shapes)

    def caption(self, index: int) -> str:
        """Such as `red disc left slowly on blue`."""
        rng = np.random.default_rng([self.seed, index, 2])
        colour, ground = rng.choice(list(COLOURS), 2, replace=False)
        shape, move, speed = (rng.choice(list(x)) for x in (SHAPES, MOVES, SPEEDS))
        return f"{colour} {shape} {move} {speed} on {ground}"

    def pixels(self, index: int) -> NDArray[np.float32]:
        """[frames, height, width, 3] in -1..1."""
        colour, shape, move, speed, _, ground = self.caption(index).split()
        frames, h, w = self.shapes[index]
        rng = np.random.default_rng([self.seed, index, 3])
        start, radius = rng.uniform(0, 1, 2), rng.uniform(0.18, 0.35)
        time = np.arange(frames)[:, None, None] / 8
        y = (np.arange(h * PATCH)[None, :, None] + 0.5) / (h * PATCH)
        x = (np.arange(w * PATCH)[None, None, :] + 0.5) / (w * PATCH)
        # The distance to the shape's centre, which leaves at one edge and comes back at the other.
        step = np.array(MOVES[move]) * SPEEDS[speed]
        dy = (y - start[0] - step[0] * time + 0.5) % 1.0 - 0.5
        dx = (x - start[1] - step[1] * time + 0.5) % 1.0 - 0.5
        inside = _inside(shape, dy, dx, radius)[..., None]
        found = np.where(inside, COLOURS[colour], COLOURS[ground])
        return found.astype(np.float32)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "patches": patches(self.pixels(index)).to(self.dtype),
            "grid": positions(self.shapes[index]),
            "caption": padded([WORDS.index(x) for x in self.caption(index).split()]),
        }


def _inside(
    shape: str, dy: NDArray[np.floating], dx: NDArray[np.floating], radius: float
) -> NDArray[np.bool_]:
    if shape == "square":
        return np.maximum(np.abs(dy), np.abs(dx)) < radius
    if shape == "diamond":
        return np.abs(dy) + np.abs(dx) < radius
    distance = np.hypot(dy, dx)
    return distance < radius if shape == "disc" else np.abs(distance - radius) < radius / 3
