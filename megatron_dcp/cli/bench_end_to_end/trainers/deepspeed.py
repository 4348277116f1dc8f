"""DeepSpeed: the small GPT in a ZeRO-1 engine, through `adapters.deepspeed.initialize`.

Against it: Ulysses over both ranks without packing (`cp:2`: one sample per microbatch, as
DeepSpeed-Ulysses runs a batch), and the fixed degrees with packing.
"""

from __future__ import annotations

import copy
from typing import Any

import torch.distributed as dist

from megatron_dcp.cli.bench_end_to_end.static_settings import plan_fn_of
from megatron_dcp.cli.bench_end_to_end.trainers import Job, Settings
from megatron_dcp.cli.bench_end_to_end.trainers.native import Native
from megatron_dcp.cli.bench_end_to_end.trainers.torch import engine_contender
from megatron_dcp.errors import AdapterError
from megatron_dcp.runtime.contender import Contender

STRATEGIES = ("dcp", "cp:2", "static:1", "static:2", "static")


class DeepSpeed(Native):
    """The reference GPT in a DeepSpeed engine."""

    strategies = STRATEGIES

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._deepspeed: Any = start_deepspeed()
        self.package = f"deepspeed {self._deepspeed.__version__}, ZeRO-1"

    def contender(self, strategy: str, job: Job) -> Contender:
        from megatron_dcp.adapters.deepspeed import initialize

        model = copy.deepcopy(self.model)
        engine, _ = initialize(
            model=model, model_parameters=model.parameters(), cost=job.linked.profile,
            plan_fn=plan_fn_of(job.world, strategy), config=config(job),
        )  # fmt: skip
        return engine_contender(strategy, engine, job)


def start_deepspeed() -> Any:
    """The package, without its optional shared-memory all-reduce: DeepSpeed compiles that at first
    use for a minute, and its collectives are the same without it."""
    from importlib import import_module

    try:
        deepspeed = import_module("deepspeed")
    except ImportError as error:
        raise AdapterError(f"--trainer deepspeed needs the package deepspeed: {error}") from error
    import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def config(job: Job) -> dict[str, Any]:
    """A stock config and the section."""
    return {
        "train_micro_batch_size_per_gpu": job.global_batch // dist.get_world_size(),
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": job.lr, "weight_decay": 0.1, "torch_adam": True},
        },
        "megatron_dcp": {"measure": True, "plan_ahead": 0},
    }


def open(settings: Settings) -> DeepSpeed:
    return DeepSpeed(settings)
