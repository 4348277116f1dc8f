"""Length presets: the statistics that their docstring states, seeds, bad input."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_dcp.data.generators import LENGTH_PRESETS, generate, video_buckets
from megatron_dcp.errors import ConfigError

FILES = Path(__file__).parents[2] / "data" / "lengths"
N = 200_000


def lengths(name: str, n: int = N, **options: float) -> np.ndarray:
    return np.array(generate(name, n, 1, **options).lengths)


@pytest.mark.parametrize("name", LENGTH_PRESETS)
def test_equal_seeds_give_equal_samples(name: str) -> None:
    first, second, other = generate(name, 300, 7), generate(name, 300, 7), generate(name, 300, 8)
    assert first == second
    assert first != other
    assert len(first.workload.lengths) == 300  # Workload checks lengths against shapes
    assert (first.shapes is not None) == name.startswith("video")


@pytest.mark.parametrize(
    ("name", "file", "quantiles"),
    [("wiki", "wiki", (50, 75)), ("prolong", "prolong", (1, 50, 90, 99)),
     ("github-like", "heavy", (10, 50, 90, 99))],
)  # fmt: skip
def test_text_presets_follow_the_length_files(
    name: str, file: str, quantiles: tuple[int, ...]
) -> None:
    real = np.loadtxt(FILES / f"{file}_16384.txt")
    drawn = lengths(name)
    assert np.log(drawn).mean() == pytest.approx(np.log(real).mean(), rel=0.01)
    assert np.log(drawn).std() == pytest.approx(np.log(real).std(), rel=0.03)
    for q in quantiles:
        assert np.percentile(drawn, q) == pytest.approx(np.percentile(real, q), rel=0.15)


def test_megatron_mock() -> None:
    drawn = lengths("megatron-mock")
    assert drawn.min() == 128
    assert drawn.max() == 8192
    inside = drawn[(drawn > 128) & (drawn < 8192)]
    # The mean of 1024 is that of the lognormal before clipping; its median is mean * exp(-s^2/2).
    assert np.median(drawn) == pytest.approx(1024 * np.exp(-1.125), rel=0.03)
    assert len(inside) > N / 2


def test_byted_like_token_shares() -> None:
    drawn = lengths("byted-like", 1_000_000)
    total = drawn.sum()
    assert np.mean(drawn <= 4096) == pytest.approx(0.80, abs=0.005)
    long, top = drawn[drawn >= 128 * 1024], drawn[drawn >= 1024 * 1024]
    assert len(long) / len(drawn) == pytest.approx(0.01, rel=0.05)
    assert long.sum() / total == pytest.approx(0.443, rel=0.05)
    assert len(top) / len(drawn) == pytest.approx(0.0005, rel=0.15)
    assert top.sum() / total == pytest.approx(0.121, rel=0.15)
    assert 1.9e6 < drawn.max() <= 2 * 1024 * 1024


def test_video_grid_tokens() -> None:
    tokens = sorted(f * h * w for images in (True, False)
                    for f, h, w in video_buckets(images=images))  # fmt: skip
    rows = ((144, 2160, 4320, 8640, 17_280), (405, 6075, 12_150, 24_300, 48_600),
            (920, 13_800, 27_600, 55_200, 110_400), (1590, 23_850, 47_700, 95_400, 190_800),
            (3600, 54_000, 108_000, 216_000, 432_000))  # fmt: skip
    assert tokens == sorted(t for row in rows for t in row)


def test_video_sets_differ_as_named() -> None:
    means = {s: lengths(f"video-{s}", 20_000, images_per_video=0).mean()
             for s in ("short", "balanced", "long")}  # fmt: skip
    assert means["short"] < means["balanced"] / 2 < means["balanced"] < means["long"] / 2
    grid = [f * h * w for f, h, w in video_buckets(images=False)]
    assert means["balanced"] == pytest.approx(np.mean(grid), rel=0.05)
    zipf = np.array([(k + 6.0) ** -3 for k in range(len(grid))])
    assert means["short"] == pytest.approx(np.dot(zipf, grid) / zipf.sum(), rel=0.05)


def test_images_per_video() -> None:
    shapes = generate("video-short", 51_000, 3).shapes
    assert shapes is not None
    assert sum(s[0] > 1 for s in shapes) == pytest.approx(1000, rel=0.1)
    alone = generate("video-short", 500, 3, images_per_video=0).shapes
    assert alone is not None
    assert all(s[0] > 1 for s in alone)


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match="wiki, prolong"):
        generate("books", 10)
    with pytest.raises(ConfigError, match="n >= 1"):
        generate("wiki", 0)
    with pytest.raises(ConfigError, match="images_per_video"):
        generate("video-long", 5, images_per_video=-1)
