"""`initialize`: what `deepspeed.initialize` returns, driven by plans.

engine, loader = initialize(model=model, training_data=data, config="ds_config.json")
for step in loader:
    for mb in step:
        mb.backward(loss_fn(engine.model(**mb.inputs).logits, mb.labels))
    step.finish()
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

import megatron_dcp as mdcp
from megatron_dcp.adapters.deepspeed.config import SECTION, split_config
from megatron_dcp.errors import AdapterError, ConfigError

log = logging.getLogger("megatron_dcp")
STATE_FILE = "megatron_dcp.json"


def initialize(
    *,
    model: nn.Module,
    config: str | Path | dict[str, Any],
    training_data: Any = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    lr_scheduler: Any = None,
    world: Any = None,
    plan_fn: Any = None,
    cost: Any = None,
    **deepspeed_arguments: Any,
) -> tuple[Any, Any]:
    """A DeepSpeed engine under plans. Collective; returns (engine, loader or None).

    The arguments are `deepspeed.initialize`'s; `config` may hold the section `megatron_dcp`.
    training_data: a data set with random access; its loader yields one step per global batch.
    plan_fn, cost, world: as in `mdcp.initialize`, where the section cannot say it.
    The DeepSpeed engine itself is `engine.model`.
    """
    import deepspeed

    for name in ("mpu", "collate_fn", "dist_init_required"):
        if deepspeed_arguments.get(name) is not None:
            raise AdapterError(
                f"{name} was passed to initialize(); ZeRO spans all data ranks and samples are "
                "cut by the plan: leave it out"
            )
    if not dist.is_initialized():
        deepspeed.init_distributed()
    split = split_config(config, dist.get_world_size())
    if dist.get_rank() == 0:
        for note in split.notes:
            log.warning("DeepSpeed config: %s", note)
    if deepspeed_arguments:
        log.debug("passed on to deepspeed.initialize: %s", sorted(deepspeed_arguments))
    zero, _, _, scheduler = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        model_parameters=model_parameters,
        lr_scheduler=lr_scheduler,
        config=split.deepspeed,
        **deepspeed_arguments,
    )
    del scheduler  # engine.step() steps it
    arguments = split.options.engine_arguments()
    if cost is not None:
        arguments["cost"] = cost
    backend = "zero2-coalesced" if split.options.coalesce else None
    engine = mdcp.initialize(zero, backend=backend, world=world, plan_fn=plan_fn, **arguments)
    loader = None
    if training_data is not None:
        loader = engine.dataloader(
            training_data, global_batch_size=split.global_batch, **split.options.loader_arguments()
        )
    return engine, loader


def save_checkpoint(engine: Any, loader: Any, directory: str | Path, tag: str) -> None:
    """DeepSpeed's own checkpoint, and beside it where the data and the plans stand. Collective."""
    engine.model.save_checkpoint(str(directory), tag=tag)
    if dist.get_rank() == 0:
        state = {"engine": engine.state_dict(), "loader": loader.state_dict()}
        target = Path(directory) / tag / STATE_FILE
        part = target.with_suffix(".part")
        part.write_text(json.dumps(state, sort_keys=True))
        os.replace(part, target)  # whole or absent
    dist.barrier()


def load_checkpoint(engine: Any, loader: Any, directory: str | Path, tag: str) -> None:
    """Restore model, optimizer, scheduler, data position and what plans depend on. Collective."""
    source = Path(directory) / tag / STATE_FILE
    try:
        state = json.loads(source.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"checkpoint {str(source)!r} cannot be read ({error}); it was not written by "
            f"save_checkpoint of {SECTION} or is torn"
        ) from error
    path, _ = engine.model.load_checkpoint(str(directory), tag=tag)
    if path is None:
        raise ConfigError(f"DeepSpeed found no checkpoint {tag!r} under {str(directory)!r}")
    engine.load_state_dict(state["engine"])
    loader.load_state_dict(state["loader"])
