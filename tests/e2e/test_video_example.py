"""examples/video_dit: what it renders, what it reads from a directory, and a run on two ranks."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_dcp.errors import ConfigError

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "video_dit"))
import clips
import media

ROOT = Path(__file__).parents[2]


def run(*options: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", "2", str(ROOT / "examples/video_dit/train.py"), *options]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def losses(text: str) -> list[float]:
    return [float(x) for x in re.findall(r"loss ([0-9.]+)", text)]


@pytest.mark.parametrize(
    ("model", "sizes"),
    [("2d", "native"), pytest.param("1d", "bucketed", marks=pytest.mark.nightly)],
)
def test_it_trains_on_two_ranks_with_images_and_videos_in_a_step(model: str, sizes: str) -> None:
    options = ["--model", model, "--sizes", sizes, "--steps", "8", "--hidden", "48"]
    out = run(*options, "--layers", "2", "--lr", "3e-3")
    found = losses(out)
    assert len(found) == 8
    assert found[-1] < 0.9 * found[0]
    assert re.search(r"[1-9]\d* videos, [1-9]\d* images", out)


def test_rendered_clips_are_a_function_of_seed_and_index() -> None:
    data, again = clips.RenderedClips(50, shrink=6), clips.RenderedClips(50, shrink=6)
    other = clips.RenderedClips(50, shrink=6, seed=1)
    for i in range(0, 50, 7):
        item = data[i]
        frames, rows, columns = data.shapes[i]
        assert data.lengths[i] == math.prod(data.shapes[i]) == len(item["patches"])
        assert item["grid"].max(dim=0).values.tolist() == [frames - 1, rows - 1, columns - 1]
        assert torch.equal(item["patches"], again[i]["patches"])
        assert float(item["patches"].abs().max()) <= 1.0
        words = [clips.WORDS[w] for w in item["caption"][0].tolist() if w]
        assert " ".join(words) == data.caption(i)
    assert data.shapes != other.shapes


def test_patches_and_positions_belong_together() -> None:
    data = clips.RenderedClips(60, shrink=4)
    i = next(j for j, s in enumerate(data.shapes) if s[0] > 1)
    item, pixels, p = data[i], data.pixels(i), clips.PATCH
    for k in (0, 5, data.lengths[i] - 1):
        f, r, c = item["grid"][k].tolist()
        want = pixels[f, r * p : (r + 1) * p, c * p : (c + 1) * p].reshape(-1)
        assert np.array_equal(item["patches"][k].numpy(), want)


def test_shapes_move_as_the_caption_says() -> None:
    data = clips.RenderedClips(400, preset="video-long", shrink=6, images_per_video=0.0)
    i = next(j for j in range(400) if "disc right" in data.caption(j))
    pixels = data.pixels(i)
    ground = np.array(clips.COLOURS[data.caption(i).split()[-1]], dtype=np.float32)
    inside = np.abs(pixels - ground).max(axis=-1) > 1e-3
    angle = np.arange(inside.shape[2]) * 2 * math.pi / inside.shape[2]
    centre = [np.angle((m * np.exp(1j * angle)).sum()) for m in inside[:4]]
    steps = np.diff(np.unwrap(centre))
    assert (steps > 0).all(), "the disc moves right, round the edge where it must"


def test_resolutions_and_frames_follow_the_grid_and_native_ones_differ() -> None:
    bucketed = clips.RenderedClips(500, preset="video-balanced", sizes="bucketed", shrink=1)
    assert {s[1:] for s in bucketed.shapes} == {(9, 16), (15, 27), (23, 40), (30, 53), (45, 80)}
    assert {s[0] for s in bucketed.shapes} == {1, 15, 30, 60, 120}  # latents of 1..408 frames
    native = clips.RenderedClips(500, preset="video-balanced", sizes="native", shrink=1)
    assert len(set(native.shapes)) > 10 * len(set(bucketed.shapes))


def pictures(folder: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for name, size in (("wide cat", (90, 40)), ("tall", (33, 70))):
        noise = np.random.default_rng(0).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
        image.fromarray(noise).save(folder / f"{name}.png")
    (folder / "tall.txt").write_text("A tall noise")


def test_images_of_a_directory_keep_their_aspect_and_captions(tmp_path: Path) -> None:
    pictures(tmp_path)
    data = media.MediaFolder(tmp_path, side=24)
    assert [p.name for p in data.files] == ["tall.png", "wide cat.png"]
    assert data.shapes == [(1, 12, 6), (1, 6, 13)]
    tall, wide = data[0], data[1]
    assert tall["patches"].shape == (72, 3 * clips.PATCH**2)
    assert -1.0 <= float(tall["patches"].min()) < float(tall["patches"].max()) <= 1.0
    counts = [int((x["caption"] > 0).sum()) for x in (tall, wide)]
    assert counts == [3, 2]


def test_faults_of_a_directory_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="holds no video and no image"):
        media.MediaFolder(tmp_path)
    (tmp_path / "broken.png").write_bytes(b"not a picture")
    pytest.importorskip("PIL.Image")
    with pytest.raises(ConfigError, match=r"broken\.png cannot be read"):
        media.MediaFolder(tmp_path)
    (tmp_path / "clip.mp4").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ConfigError, match=r"1 videos, which are read with av.*pip install av"):
        media.MediaFolder(tmp_path)


def write_video(path: Path, frames: list[Any]) -> None:
    av = pytest.importorskip("av")
    with av.open(str(path), "w") as file:
        stream = file.add_stream("mpeg4", rate=8)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode())


def test_videos_of_a_directory_are_read_by_pyav(tmp_path: Path) -> None:
    grey = [np.full((48, 64, 3), 10 * i, dtype=np.uint8) for i in range(17)]
    write_video(tmp_path / "ramp.mp4", grey)
    data = media.MediaFolder(tmp_path, side=24, every=4)
    assert data.shapes == [(5, 6, 8)]
    frames = data.pixels(0).mean(axis=(1, 2, 3))
    assert np.allclose(frames, np.array([0, 40, 80, 120, 160]) / 127.5 - 1, atol=0.05)
    (tmp_path / "ramp.mp4").write_bytes((tmp_path / "ramp.mp4").read_bytes()[:300])
    with pytest.raises(ConfigError, match=r"ramp\.mp4"):
        media.MediaFolder(tmp_path)


@pytest.mark.nightly
def test_it_trains_on_a_directory(tmp_path: Path) -> None:
    pictures(tmp_path)
    out = run("--data", str(tmp_path), "--side", "16", "--steps", "3", "--hidden", "48")
    assert len(losses(out)) == 3
    assert "0 videos, 2 images" in out
