"""megatron-core: its GPTModel, DDP, optimizer and schedule, planned by `MegatronDcp`.

Against it, on two ranks: Megatron's static CP2 (`cp:2`: one sample per microbatch over both
ranks), packing balanced over static CP2 like its `dp_balanced` scheduler (`packed:2`), and the
greedy of its dynamic context parallelism (`megatron`).
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from megatron_dcp.cli.bench_end_to_end.static_settings import EVERYBODY
from megatron_dcp.cli.bench_end_to_end.trainers import Job, Settings
from megatron_dcp.cli.train.model import GptConfig
from megatron_dcp.cli.train.stack import Stack
from megatron_dcp.cost import dumps
from megatron_dcp.dist import PlacementContext
from megatron_dcp.errors import AdapterError, ConfigError
from megatron_dcp.runtime.contender import Contender, timed_by_clock

STRATEGIES = ("dcp", "cp:2", "packed:2", "megatron")


class Megatron:
    """The shape of the reference GPT as a megatron-core model."""

    strategies = STRATEGIES

    def __init__(self, settings: Settings) -> None:
        try:
            from megatron_dcp.adapters.megatron import small

            self.package = f"megatron-core {small.start()}"
        except ImportError as error:
            raise AdapterError(f"--trainer megatron needs megatron-core: {error}") from error
        self._small: Any = small
        self._settings = settings
        c = GptConfig.of(settings.model)
        self._ffn = c.ffn
        self._shape = c.shape()

    def _model(self) -> Any:
        s = self._settings
        return self._small.small_gpt(
            self._shape, self._ffn, max_length=s.max_length, seed=s.seed
        )  # fmt: skip

    def stack(self) -> Stack:
        model = self._model()

        def run(context: PlacementContext, recompute: int) -> None:
            self._small.run_pack(model, context, recompute)

        return Stack(
            run=run, parameters=list(model.parameters()), shape=self._shape,
            max_length=self._settings.max_length, say=self._settings.say,
        )  # fmt: skip

    def contender(self, strategy: str, job: Job) -> Contender:
        if strategy.endswith(EVERYBODY) or timed_by_clock(strategy):
            raise ConfigError(f"--trainer megatron cannot run strategy {strategy!r}")
        with tempfile.TemporaryDirectory(prefix="mdcp-bench-") as folder:  # read when it is made
            cost = Path(folder) / "cost.json"
            cost.write_text(dumps(job.linked.profile))
            made: Contender = self._small.SmallMegatron(
                strategy, self._model(), job.corpus, cost=str(cost), global_batch=job.global_batch,
                seed=job.seed, lr=job.lr, bytes_per_s=job.linked.bytes_per_s,
            )  # fmt: skip
        return made


def open(settings: Settings) -> Megatron:
    return Megatron(settings)
