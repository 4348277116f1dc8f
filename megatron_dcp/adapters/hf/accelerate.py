"""Accelerate: prepared model, optimizer and scheduler under a per-step plan.

    prepared = prepare(model)
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

from transformers import PreTrainedModel

import megatron_dcp as mdcp
from megatron_dcp.adapters.hf.options import TrainerOptions
from megatron_dcp.adapters.hf.prepare import mark_of
from megatron_dcp.errors import AdapterError

# Options that are given elsewhere in a loop of one's own.
_ELSEWHERE = {
    "max_length": "engine.dataloader", "fused_loss": "prepare", "allow_dropout": "prepare",
}  # fmt: skip


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

    model: a Transformers model must have gone through `prepare` before. options: `max_length` is an
    argument of `engine.dataloader`, `fused_loss` and `allow_dropout` are arguments of `prepare`.
    max_grad_norm: clip after the reduction (DeepSpeed clips by its own config: leave it out).
    """
    _check(accelerator)
    options = options or TrainerOptions()
    _check_options(options)
    _check_prepared(model)
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


def _check_options(options: TrainerOptions) -> None:
    usual = TrainerOptions()
    wrong = [
        f"{name}={getattr(options, name)!r} (give it to {where})"
        for name, where in _ELSEWHERE.items()
        if getattr(options, name) != getattr(usual, name)
    ]
    if wrong:
        raise AdapterError("initialize_accelerate does not take " + "; ".join(wrong))


def _check_prepared(model: Any) -> None:
    """A stock Transformers model would attend inside its shard alone, across samples."""
    from accelerate.utils import extract_model_from_parallel

    inner = extract_model_from_parallel(model, keep_torch_compile=False)
    base = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
    if isinstance(base, PreTrainedModel) and mark_of(inner) is None:
        raise AdapterError(
            f"{type(inner).__name__} was not made plan-aware: call "
            "megatron_dcp.adapters.hf.prepare(model) on it before accelerator.prepare"
        )


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
