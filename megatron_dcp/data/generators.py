"""Synthetic length data by name: text lengths and video shapes, seeded, the same on every machine.

Text presets are distributions, not files of documents; `wiki` and `prolong` follow the log-mean,
spread and quantiles of the length files in tests/data/lengths, the others are synthetic throughout:

    wiki           lognormal(5.950, 1.258)
    prolong        575 + lognormal(7.22, 1.06): the shifted lognormal whose logarithms have mean
                   7.682 and deviation 0.738, as those of the ProLong documents have
    github-like    lognormal(7.5, 1.7)
    megatron-mock  lognormal of mean 1024 and sigma 1.5, clipped to 128..8192
    byted-like     80 % up to 4K tokens, 1 % of at least 128K holding 44.3 % of the tokens, 0.05 %
                   of 1M..2M holding 12.1 %

Video presets draw a (resolution, frames) bucket of the Open-Sora grid, in patches of the latent
video. A share of images (1 frame) joins the videos, as in the original benchmark: 50 images per
video. Buckets are ranked by tokens; `video-short` draws them by Zipf (alpha 3, offset 5) from the
smallest, `video-long` from the largest, `video-balanced` evenly; images and videos each on their
own ranking.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_dcp.errors import ConfigError
from megatron_dcp.plan import Workload

Floats = NDArray[np.float64]
Shape = tuple[int, int, int]

MAX_TEXT_TOKENS = 384 * 1024
IMAGES_PER_VIDEO = 50.0

# Resolution -> (height, width) in patches; latent frames of 1, 51, 102, 204 and 408 video frames.
GRID: dict[str, tuple[int, int]] = {
    "144p": (9, 16),
    "240p": (15, 27),
    "360p": (23, 40),
    "480p": (30, 53),
    "720p": (45, 80),
}
LATENT_FRAMES: dict[int, int] = {1: 1, 51: 15, 102: 30, 204: 60, 408: 120}

_K = 1024
_ZIPF_ALPHA, _ZIPF_OFFSET = 3.0, 5


class Generated(NamedTuple):
    """Lengths in tokens and, for video, shapes (frames, height, width) in patches, else None."""

    lengths: tuple[int, ...]
    shapes: tuple[Shape, ...] | None

    @property
    def workload(self) -> Workload:
        return Workload(lengths=self.lengths, shapes=self.shapes)


def _lognormal(mu: float, sigma: float, shift: float = 0.0) -> Callable[..., Floats]:
    def draw(rng: np.random.Generator, n: int) -> Floats:
        return np.clip(shift + rng.lognormal(mu, sigma, n), 1, MAX_TEXT_TOKENS)

    return draw


def _megatron_mock(rng: np.random.Generator, n: int) -> Floats:
    sigma = 1.5
    return np.clip(rng.lognormal(math.log(1024) - sigma * sigma / 2, sigma, n), 128, 8192)


# (share of the samples, from, to, exponent of the density x ** -(1 + exponent))
_BYTED: tuple[tuple[float, float, float, float], ...] = (
    (0.80, 128, 4 * _K, 0.0),
    (0.19, 4 * _K, 128 * _K, 1.099),
    (0.0095, 128 * _K, _K * _K, 2.4506),
    (0.0005, _K * _K, 2 * _K * _K, 0.0),
)


def _byted_like(rng: np.random.Generator, n: int) -> Floats:
    """A mixture of four bounded power laws whose exponents give the stated token shares."""
    parts = rng.choice(len(_BYTED), n, p=[row[0] for row in _BYTED])
    uniform = rng.random(n)
    out = np.empty(n)
    for k, (_, low, high, exponent) in enumerate(_BYTED):
        u = uniform[parts == k]
        if exponent == 0.0:
            out[parts == k] = low * (high / low) ** u
        else:
            a, b = low**-exponent, high**-exponent
            out[parts == k] = (a - u * (a - b)) ** (-1.0 / exponent)
    return out


_TEXT: dict[str, Callable[..., Floats]] = {
    "wiki": _lognormal(5.950, 1.258),
    "prolong": _lognormal(7.22, 1.06, shift=575),
    "github-like": _lognormal(7.5, 1.7),
    "megatron-mock": _megatron_mock,
    "byted-like": _byted_like,
}
_VIDEO: dict[str, str] = {
    "video-short": "ascending",
    "video-balanced": "even",
    "video-long": "descending",
}
LENGTH_PRESETS: tuple[str, ...] = (*_TEXT, *_VIDEO)


def video_buckets(*, images: bool) -> list[Shape]:
    """Shapes of the grid with 1 frame (images) or more (videos), fewest tokens first."""
    shapes = [
        (frames, height, width)
        for height, width in GRID.values()
        for frames in LATENT_FRAMES.values()
        if (frames == 1) == images
    ]
    return sorted(shapes, key=lambda s: (math.prod(s), s))


def _weights(count: int, order: str) -> Floats:
    """Probabilities of `count` ranked buckets."""
    if order == "even":
        return np.full(count, 1.0 / count)
    weights = (np.arange(count) + 1.0 + _ZIPF_OFFSET) ** -_ZIPF_ALPHA
    if order == "descending":
        weights = weights[::-1]
    normalised: Floats = weights / weights.sum()
    return normalised


def _video(
    rng: np.random.Generator, n: int, order: str, images_per_video: float
) -> Sequence[Shape]:
    image = rng.random(n) < images_per_video / (1.0 + images_per_video)
    shapes: list[Shape] = [(1, 1, 1)] * n
    for is_image in (True, False):
        buckets = video_buckets(images=is_image)
        where = np.flatnonzero(image == is_image)
        drawn = rng.choice(len(buckets), len(where), p=_weights(len(buckets), order))
        for i, bucket in zip(where, drawn, strict=True):
            shapes[i] = buckets[bucket]
    return shapes


def generate(
    name: str, n: int, seed: int = 0, *, images_per_video: float = IMAGES_PER_VIDEO
) -> Generated:
    """n samples of a length preset; equal (name, n, seed) give equal samples.

    images_per_video: video presets only; 0 draws videos alone. Raises ConfigError for an unknown
    name or an impossible number.
    """
    if name not in LENGTH_PRESETS:
        raise ConfigError(
            f"length preset {name!r} is not known; use one of {', '.join(LENGTH_PRESETS)}"
        )
    if n < 1 or seed < 0:
        raise ConfigError(f"length preset {name!r}: found n {n} and seed {seed}; n >= 1, seed >= 0")
    if not (images_per_video >= 0 and math.isfinite(images_per_video)):
        raise ConfigError(f"images_per_video: found {images_per_video}, it must be a number >= 0")
    rng = np.random.default_rng([seed, LENGTH_PRESETS.index(name)])
    if name in _TEXT:
        lengths = np.floor(_TEXT[name](rng, n) + 0.5).astype(np.int64)
        return Generated(tuple(int(x) for x in lengths), None)
    shapes = tuple(_video(rng, n, _VIDEO[name], images_per_video))
    return Generated(tuple(math.prod(s) for s in shapes), shapes)
