"""`transformers.Trainer` with a small Llama, under DDP, through `MdcpTrainerMixin`.

Against it: TRL's packing (`trl-packing`), alone on each rank or shared by both.
"""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from typing import Any

from megatron_dcp.cli.bench_end_to_end.static_settings import plan_fn_of
from megatron_dcp.cli.bench_end_to_end.trainers import Job, Settings
from megatron_dcp.cli.train.model import GptConfig
from megatron_dcp.cli.train.stack import Stack
from megatron_dcp.dist import PlacementContext
from megatron_dcp.errors import AdapterError
from megatron_dcp.runtime.contender import Contender
from megatron_dcp.runtime.recompute import find_layers, wrap_layers

STRATEGIES = ("dcp", "trl-packing:1", "trl-packing:2", "static")
STEPS = 64  # of an epoch of the Trainer; a longer comparison draws samples again


class HuggingFace:
    """The shape of the reference GPT as a Llama."""

    strategies = STRATEGIES

    def __init__(self, settings: Settings) -> None:
        os.environ.update(ACCELERATE_USE_CPU="true", TOKENIZERS_PARALLELISM="false")
        try:
            from megatron_dcp.adapters.hf import small
        except ImportError as error:
            raise AdapterError(f"--trainer hf needs the package transformers: {error}") from error
        self._small: Any = small
        self._settings = settings
        self.package = f"transformers {small.VERSION}"
        c = GptConfig.of(settings.model)
        self._shape = c.shape()
        self.model = small.small_llama(self._shape, c.ffn, seed=settings.seed)

    def stack(self) -> Stack:
        model = copy.deepcopy(self.model)
        self._small.prepare(model)
        layers = find_layers(model)
        assert layers is not None
        wrap_layers(layers)

        def run(context: PlacementContext, recompute: int) -> None:
            context.placement = replace(context.placement, recompute=recompute)
            self._small.run_pack(model, context)

        return Stack(
            run=run, parameters=list(model.parameters()), shape=self._shape,
            max_length=self._settings.max_length, say=self._settings.say,
        )  # fmt: skip

    def contender(self, strategy: str, job: Job) -> Contender:
        small = self._small
        options = small.TrainerOptions(
            cost=job.linked.profile, measure=True, plan_ahead=0,
            plan_fn=plan_fn_of(job.world, strategy),
        )  # fmt: skip
        ours = small.TrainerJob(
            data=small.Bytes(job.corpus, STEPS * job.global_batch, job.seed),
            ranks=job.world.size, global_batch=job.global_batch, seed=job.seed, lr=job.lr,
            bytes_per_s=job.linked.bytes_per_s, options=options,
        )  # fmt: skip
        made: Contender = small.contender(strategy, copy.deepcopy(self.model), ours)
        return made


def open(settings: Settings) -> HuggingFace:
    return HuggingFace(settings)
