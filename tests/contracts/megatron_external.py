"""examples/megatron_gpt/pretrain.py with loaders of its own, for --dataloader-type external.

Items of the data-parallel rank in SPOILED_RANK (environment) have no tokens.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.core import mpu

FILE = Path(__file__).parents[2] / "examples" / "megatron_gpt" / "pretrain.py"
spec = importlib.util.spec_from_file_location("megatron_gpt_example", FILE)
assert spec is not None
assert spec.loader is not None
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)
datasets = example.datasets


def batches(dataset: Any) -> Iterator[dict[str, Any]]:
    """Every item of this data-parallel rank as a batch of one row."""
    rank, ranks = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    spoiled = os.environ.get("SPOILED_RANK") == str(rank)
    for i in range(rank, len(dataset), ranks):
        item = {name: value[None] for name, value in dataset[i].items()}
        if spoiled:
            del item["tokens"]
        yield item


def loaders(counts: list[int], vp_stage: int | None = None) -> tuple[Iterator[Any], ...]:
    return tuple(batches(dataset) for dataset in datasets(counts, vp_stage))


example.datasets = loaders

if __name__ == "__main__":
    example.main()
