"""A small training job in which one rank misbehaves at a given step; run under torchrun.

usage: stall.py FAULT RANK STEP DIRECTORY TIMEOUT_S
FAULT: sleep (stops in its microbatch), stop (SIGSTOP: not even its watchdog runs), slow (10 times
slower than the others, but alive), clock (the wall clock jumps by a day).
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

import megatron_dcp as mdcp
from megatron_dcp.testing.cases.gradients import Samples, random_lengths, weighted_loss_sum
from megatron_dcp.testing.models import TinyModel
from megatron_dcp.testing.plans import tiny_profile


def misbehave(fault: str) -> None:
    if fault == "sleep":
        time.sleep(600)
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "slow":
        time.sleep(0.5)
    elif fault == "clock":
        jumped = time.time() + 86_400
        time.time = lambda: jumped


def main() -> None:
    fault, rank, at, folder, timeout = sys.argv[1:]
    dist.init_process_group("gloo")
    model = TinyModel(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    engine = mdcp.initialize(
        model, optimizer, cost=tiny_profile(), strategy="packed:2", watchdog_s=float(timeout),
        watchdog_dir=folder,
    )  # fmt: skip
    data = Samples(random_lengths(0, 40, 30), 0)
    loader = engine.dataloader(data, global_batch_size=6, lengths="lengths", steps=6)
    for step in loader:
        for mb in step:
            if engine.world.rank == int(rank) and step.index >= int(at):
                misbehave(fault)
            loss = weighted_loss_sum(model(**mb.inputs), mb.labels, mb.weights)
            mb.backward(loss)
        step.finish()
        print(f"finished {step.index}", flush=True)
    engine.close()
    dist.destroy_process_group()


main()
