"""Train a video diffusion transformer on clips and images of every size, mixed in each step.

    torchrun --nproc_per_node 2 examples/video_dit/train.py --model 2d
    torchrun --nproc_per_node 2 examples/video_dit/train.py --model 1d --data DIRECTORY

Without --data the example renders its own captioned clips. docs/video.md says what happens.
"""

from __future__ import annotations

import argparse
import math
import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from clips import RenderedClips
from dit import DitConfig, VideoDit, flow_loss_sum
from media import MediaFolder

import megatron_dcp as mdcp


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=["1d", "2d"], default="2d")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16, help="samples per step, over all ranks")
    parser.add_argument("--strategy", default="dcp")
    parser.add_argument("--data", type=Path, help="directory of videos and images")
    parser.add_argument("--side", type=int, default=32, help="shorter side in pixels, for --data")
    parser.add_argument("--preset", default="video-short", help="lengths of the rendered clips")
    parser.add_argument("--sizes", choices=["native", "bucketed"], default="native")
    parser.add_argument("--shrink", type=int, default=6, help="divides every side and the frames")
    parser.add_argument("--images-per-video", type=float, default=3.0)
    parser.add_argument("--hidden", type=int, default=96)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def dataset(args: argparse.Namespace) -> Any:
    if args.data is not None:
        return MediaFolder(args.data, side=args.side)
    return RenderedClips(
        2000, preset=args.preset, sizes=args.sizes, shrink=args.shrink,
        images_per_video=args.images_per_video, seed=args.seed,
    )  # fmt: skip


def main() -> None:
    args = options()
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    first = not dist.is_initialized() or dist.get_rank() == 0
    torch.manual_seed(args.seed)
    model = VideoDit(DitConfig(grid=args.model, hidden=args.hidden, layers=args.layers))
    if torch.cuda.is_available():
        model.cuda(int(os.environ.get("LOCAL_RANK", 0)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    engine = mdcp.initialize(model, optimizer, strategy=args.strategy, max_grad_norm=1.0)
    data = dataset(args)
    loader = engine.dataloader(
        data, global_batch_size=min(args.batch, len(data)), lengths="lengths", shapes="shapes",
        seed=args.seed, steps=args.steps, per_sample=["caption"], shift_labels=False,
    )  # fmt: skip
    for step in loader:
        for mb in step:
            mb.backward(flow_loss_sum(model, mb.inputs, mb.weights, seed=args.seed))
        loss = step.finish()
        if first:
            print(f"step {step.index:3d}  loss {loss:.4f}  {described(step.plan)}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def described(plan: Any) -> str:
    """Such as `4 videos, 12 images, 3120 patches; placements by degree 1: 5, 2: 1`."""
    shapes = plan.workload.shapes
    images = sum(s[0] == 1 for s in shapes)
    degrees = Counter(p.degree for p in plan.placements)
    return (
        f"{len(shapes) - images} videos, {images} images, {sum(map(math.prod, shapes))} patches; "
        f"placements by degree {', '.join(f'{d}: {n}' for d, n in sorted(degrees.items()))}"
    )


if __name__ == "__main__":
    main()
