"""Accelerate: prepared model, optimizer and scheduler under a per-step plan.

    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    engine = initialize_accelerate(accelerator, model, optimizer, scheduler)
    for step in engine.dataloader(...):
        ...

Accelerate's own loader is not used: samples are cut by the plan. Its optimizer steps only while
`sync_gradients` is set, and its scheduler steps once per process: here both step once per optimizer
step.
"""

from __future__ import annotations

from typing import Any

import megatron_dcp as mdcp
from megatron_dcp.adapters.hf.options import TrainerOptions
from megatron_dcp.errors import AdapterError


def initialize_accelerate(
    accelerator: Any,
    model: Any,
    optimizer: Any = None,
    scheduler: Any = None,
    *,
    options: TrainerOptions | None = None,
    max_grad_norm: float | None = None,
) -> Any:
    """An engine over what `accelerator.prepare` returned. Collective.

    max_grad_norm: clip after the reduction (DeepSpeed clips by its own config: leave it out).
    """
    _check(accelerator)
    options = options or TrainerOptions()
    deepspeed = str(accelerator.distributed_type).endswith("DEEPSPEED")
    # The engine of DeepSpeed steps its own optimizer; what Accelerate returned does nothing there.
    accelerator.gradient_state._set_sync_gradients(True)
    return mdcp.initialize(
        model,
        None if deepspeed else optimizer,
        scheduler=_plain_scheduler(scheduler, deepspeed),
        max_grad_norm=max_grad_norm,
        **options.engine_arguments(),
    )


def _plain_scheduler(scheduler: Any, deepspeed: bool) -> Any:
    """The user's scheduler, stepped once per step; DeepSpeed's own is stepped by its engine."""
    if scheduler is None:
        return None
    inner = getattr(scheduler, "scheduler", scheduler)
    name = type(scheduler).__name__
    if deepspeed and name == "DeepSpeedSchedulerWrapper":
        return None
    return inner


def _check(accelerator: Any) -> None:
    wrong = []
    if accelerator.gradient_accumulation_steps != 1:
        wrong.append(
            f"gradient_accumulation_steps={accelerator.gradient_accumulation_steps} (the plan "
            "decides; set 1 and raise global_batch_size)"
        )
    if accelerator.mixed_precision == "fp16" and accelerator.scaler is not None:
        wrong.append("mixed_precision='fp16' (use 'bf16', or DeepSpeed's fp16)")
    parallel = getattr(accelerator, "parallelism_config", None)
    for name in ("sp_size", "cp_size"):
        size = getattr(parallel, name, 1) or 1
        if parallel is not None and size > 1:
            wrong.append(f"ParallelismConfig({name}={size}) (the plan shares sequences; set 1)")
    if wrong:
        raise AdapterError("Accelerate is set up with " + "; ".join(wrong))
