"""A directory of real videos and images as samples, at their own sizes: nothing is padded.

Images (.png .jpg .jpeg .webp .bmp) are read by Pillow, videos (.mp4 .mkv .webm .mov .avi .gif) by
PyAV; either is needed only if such files are there. Every side is scaled by one factor so that the
shorter has `side` pixels, then cut to whole patches; of a video every `every`-th frame is taken, at
most `most_frames`. The caption is the text file of the same name, else the file's name.

Sizes are read once, from the headers; a file that cannot be read is an error that names it.
"""

from __future__ import annotations

import math
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from clips import CAPTION_WORDS, PATCH, padded, patches, positions
from numpy.typing import NDArray

from megatron_dcp.errors import ConfigError

IMAGES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp"})
VIDEOS = frozenset({".mp4", ".mkv", ".webm", ".mov", ".avi", ".gif"})
VOCABULARY = 256


def _need(package: str, module: str, count: int, kind: str) -> Any:
    try:
        return __import__(module, fromlist=["*"])
    except ImportError:
        raise ConfigError(
            f"the directory holds {count} {kind}, which are read with {package}, and it is not "
            f"installed: pip install {package}"
        ) from None


class MediaFolder:
    """All videos and images below a directory, in path order; see the module docstring."""

    def __init__(
        self,
        root: Path,
        *,
        side: int = 32,
        every: int = 4,
        most_frames: int = 102,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.side, self.every, self.most_frames, self.dtype = side, every, most_frames, dtype
        files = sorted(p for p in root.rglob("*") if p.suffix.lower() in IMAGES | VIDEOS)
        if not files:
            kinds = " ".join(sorted(IMAGES | VIDEOS))
            raise ConfigError(f"{root} holds no video and no image; looked for {kinds}")
        images = [p for p in files if p.suffix.lower() in IMAGES]
        if images:
            self._pillow = _need("pillow", "PIL.Image", len(images), "images")
        if len(images) < len(files):
            self._av = _need("av", "av", len(files) - len(images), "videos")
        self.files = files
        self.shapes = [self._shape(p) for p in files]
        self.lengths = [math.prod(s) for s in self.shapes]

    def __len__(self) -> int:
        return len(self.files)

    def _shape(self, path: Path) -> tuple[int, int, int]:
        """(frames, rows, columns) in patches."""
        try:
            if path.suffix.lower() in IMAGES:
                with self._pillow.open(path) as image:
                    frames, width, height = 1, image.width, image.height
            else:
                with self._av.open(str(path)) as file:
                    stream = file.streams.video[0]
                    width, height = stream.width, stream.height
                    frames = stream.frames or sum(1 for _ in file.decode(stream))
        except (OSError, ValueError, IndexError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        width, height = self._scaled(width, height)
        taken = min(-(-frames // self.every), self.most_frames) if frames > 1 else 1
        return max(1, taken), height // PATCH, width // PATCH

    def _scaled(self, width: int, height: int) -> tuple[int, int]:
        """Size in pixels that keeps the aspect, whole patches."""
        factor = self.side / min(width, height)
        return tuple(max(PATCH, round(n * factor) // PATCH * PATCH) for n in (width, height))  # type: ignore[return-value]

    def pixels(self, index: int) -> NDArray[np.float32]:
        """[frames, height, width, 3] in -1..1."""
        path, (frames, rows, columns) = self.files[index], self.shapes[index]
        size = (columns * PATCH, rows * PATCH)
        if path.suffix.lower() in IMAGES:
            with self._pillow.open(path) as image:
                found = [np.asarray(image.convert("RGB").resize(size))]
        else:
            found = []
            with self._av.open(str(path)) as file:
                for i, frame in enumerate(file.decode(video=0)):
                    if i % self.every == 0:
                        small = frame.reformat(width=size[0], height=size[1], format="rgb24")
                        found.append(small.to_ndarray())
                    if len(found) == frames:
                        break
        if len(found) != frames:
            raise ConfigError(
                f"{path}: the header promises {frames} frames to take, {len(found)} could be read; "
                "the file is cut short or its header is wrong"
            )
        return np.stack(found).astype(np.float32) / 127.5 - 1.0

    def caption(self, index: int) -> str:
        """The text beside the file, else its name."""
        text = self.files[index].with_suffix(".txt")
        return text.read_text() if text.exists() else self.files[index].stem

    def __getitem__(self, index: int) -> dict[str, Any]:
        words = re.findall(r"\w+", self.caption(index).lower())[:CAPTION_WORDS]
        ids = [1 + zlib.crc32(w.encode()) % (VOCABULARY - 1) for w in words]
        return {
            "patches": patches(self.pixels(index)).to(self.dtype),
            "grid": positions(self.shapes[index]),
            "caption": padded(ids),
        }
