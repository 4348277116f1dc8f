"""A training job whose device holds less than its plans believe; run under the launcher.

usage: small_device.py DIRECTORY CAPACITY WATCHDOG_S

Placements above CAPACITY bytes fail on rank 1 after their first message, where no step can be
planned again. Checkpoints every 2 steps; goes on from the newest one when started again.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import megatron_dcp as mdcp
from megatron_dcp.runtime.checkpoint import load_checkpoint, save_checkpoint
from megatron_dcp.testing.cases.gradients import Samples, random_lengths, weighted_loss_sum
from megatron_dcp.testing.models import TinyModel
from megatron_dcp.testing.plans import tiny_profile


def main() -> None:
    folder, capacity, watchdog = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    dist.init_process_group("gloo")
    model = TinyModel(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    engine = mdcp.initialize(
        model, optimizer, cost=tiny_profile(), strategy="packed:2", watchdog_s=watchdog,
        watchdog_dir=str(folder), memory=1e-3,
    )  # fmt: skip
    data = Samples(random_lengths(0, 60, 60), 0)
    loader = engine.dataloader(data, global_batch_size=10, lengths="lengths", steps=6)
    load_checkpoint(engine, loader, folder / "checkpoints")
    rank = engine.world.rank

    def loss_fn(mb):
        loss = weighted_loss_sum(model(**mb.inputs), mb.labels, mb.weights)
        if rank == 1 and mb.placement.bytes > capacity:
            raise torch.OutOfMemoryError(f"made up: {mb.placement.bytes} bytes asked")
        return loss

    for step in loader:
        loss = step.run(loss_fn)
        if rank == 0:
            with (folder / "steps.jsonl").open("a") as file:
                line = {"step": step.index, "loss": loss, "budget": step.plan.budget_bytes}
                file.write(json.dumps(line) + "\n")
        if step.index % 2:
            save_checkpoint(engine, loader, folder / "checkpoints")
    engine.close()
    dist.destroy_process_group()


main()
