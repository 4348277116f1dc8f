"""The reference trainer: the small GPT of `mdcp train` through the engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_dcp.cli.bench_end_to_end.static_settings import plan_fn_of
from megatron_dcp.cli.bench_end_to_end.trainers import Job, Settings
from megatron_dcp.cli.train.compare import gpt_stack, native_contender
from megatron_dcp.cli.train.model import Gpt, GptConfig
from megatron_dcp.cli.train.stack import Stack
from megatron_dcp.runtime.contender import Contender
from megatron_dcp.runtime.recompute import wrap_layers

# The solver's time limit only matters where it is reached: these programs are small.
STRATEGIES = ("dcp", "packed:2", "static", "bucket", "dcp-inter", "dcp-intra", "megatron",
              "flexsp:2")  # fmt: skip


class Native:
    """model: the initial weights, which every contender copies."""

    strategies: Sequence[str] = STRATEGIES
    package = f"torch {torch.__version__}"

    def __init__(self, settings: Settings) -> None:
        torch.manual_seed(settings.seed)
        self._settings = settings
        self.model = Gpt(GptConfig.of(settings.model))
        if settings.device != "cpu":
            self.model.to(settings.device, torch.bfloat16)
        wrap_layers(self.model.layers)

    def stack(self) -> Stack:
        return gpt_stack(self.model, max_length=self._settings.max_length, say=self._settings.say)

    def contender(self, strategy: str, job: Job) -> Contender:
        # Planned between the steps: another strategy's timed step runs while one would plan ahead.
        return native_contender(
            strategy, world=job.world, model=self.model, corpus=job.corpus, linked=job.linked,
            global_batch=job.global_batch, seed=job.seed, lr=job.lr, plan_ahead=0,
            plan_fn=plan_fn_of(job.world, strategy),
        )  # fmt: skip


def open(settings: Settings) -> Native:
    return Native(settings)
