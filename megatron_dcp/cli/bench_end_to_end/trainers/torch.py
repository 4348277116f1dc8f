"""A plain PyTorch loop: the small GPT in DistributedDataParallel, gradients reduced by it.

Against it: Ulysses or ring over a fixed degree (`static:1`, `static:2`, and the best of both for
each batch), and Karmarkar-Karp balancing with equal microbatch counts as verl does it (`kk@all`).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import megatron_dcp as mdcp
from megatron_dcp.cli.bench_end_to_end.static_settings import plan_fn_of
from megatron_dcp.cli.bench_end_to_end.trainers import Job, Settings
from megatron_dcp.cli.bench_end_to_end.trainers.native import Native
from megatron_dcp.cli.train.model import loss_sum
from megatron_dcp.dist import LinkPacer
from megatron_dcp.runtime.contender import Contender, EngineContender

STRATEGIES = ("dcp", "static:1", "static:2", "static", "kk@all")


class Torch(Native):
    """The reference GPT, wrapped by DDP."""

    strategies = STRATEGIES

    def contender(self, strategy: str, job: Job) -> Contender:
        model = copy.deepcopy(self.model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=job.lr, weight_decay=0.1)
        wrapped = DistributedDataParallel(model)
        engine = mdcp.initialize(
            wrapped, optimizer, cost=job.linked.profile, measure=True, plan_ahead=0,
            plan_fn=plan_fn_of(job.world, strategy),
        )  # fmt: skip
        return engine_contender(strategy, engine, job)


def engine_contender(strategy: str, engine: Any, job: Job) -> EngineContender:
    """The steps of an engine over the job's data, on the job's link. The model is called as
    `model(**mb.inputs)` and returns logits [t, V]."""
    if job.linked.bytes_per_s is not None:
        engine.world.wire.pacer = LinkPacer(job.linked.bytes_per_s)
    loader = engine.dataloader(
        job.corpus, global_batch_size=job.global_batch, lengths="lengths", seed=job.seed
    )

    def loss(mb: Any) -> torch.Tensor:
        return loss_sum(engine.model(**mb.inputs), mb.labels)

    return EngineContender(strategy, engine, iter(loader), loss)


def open(settings: Settings) -> Torch:
    return Torch(settings)
