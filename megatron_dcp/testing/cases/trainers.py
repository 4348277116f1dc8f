"""`transformers.Trainer`, TRL's `SFTTrainer` and Accelerate under random plans.

Each case trains a tiny Llama for a few steps and compares parameters and logged losses with one
process that runs the stock model sample by sample. Real packages, real process groups.
"""

from __future__ import annotations

import copy
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import megatron_dcp as mdcp
from megatron_dcp.adapters.hf import (
    MdcpCallback,
    MdcpTrainerMixin,
    TrainerOptions,
    microbatch_loss,
    prepare,
)
from megatron_dcp.testing.cases.backends import (
    random_plans,
    skip_shared_memory_op,
    zero_config,
)
from megatron_dcp.testing.cases.gradients import Samples, random_lengths
from megatron_dcp.testing.cases.hf import profile_of, stock_step
from megatron_dcp.testing.hf_models import tiny_model

RATE = 0.1
CLIP = 0.5


def launcher_environment(backend: str) -> None:
    """What torchrun and `accelerate launch` would have set, for packages that read it."""
    zero = backend.startswith("zero")
    if zero:
        skip_shared_memory_op()
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", DS_ACCELERATOR="cpu",
        TOKENIZERS_PARALLELISM="false", ACCELERATE_USE_DEEPSPEED=str(zero).lower(),
        # Accelerate takes its CPU path only without DeepSpeed.
        ACCELERATE_USE_CPU=str(not zero).lower(),
    )  # fmt: skip


def reset_accelerate() -> None:
    """Accelerate keeps one state per process; each case starts with a fresh one."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def reference_run(
    model: Any, data: Samples, batches: list[list[int]], clip: float
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and parameters of plain SGD with clipping in one process."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for indices in batches:
        loss, _ = stock_step(model, data, indices, None)
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return losses, {n: p.detach().clone() for n, p in model.named_parameters()}


def trainer_case(
    *,
    seed: int,
    backend: str = "ddp",
    trainer: str = "transformers",
    per_device: int = 2,
    accumulation: int = 2,
    epochs: int = 1,
    stop_at: int | None = None,
    directory: str | None = None,
    resume: bool = False,
    checkpointing: bool = False,
    run: str | None = None,
) -> dict[str, Any]:
    """Parameter and loss differences of a whole `trainer.train()`.

    run: write a run directory there. stop_at: save there; resume: start from the checkpoint in
    `directory`.
    """
    launcher_environment(backend)
    reset_accelerate()
    ranks = dist.get_world_size()
    batch = per_device * accumulation * ranks
    data = Samples(random_lengths(seed, 2 * batch + 3), seed, masked=0.2)
    stock = tiny_model("llama", seed=seed)
    model = copy.deepcopy(stock)
    output = directory or tempfile.mkdtemp()
    arguments: dict[str, Any] = {
        "output_dir": output, "per_device_train_batch_size": per_device,
        "gradient_accumulation_steps": accumulation, "num_train_epochs": epochs,
        "learning_rate": RATE, "lr_scheduler_type": "constant", "optim": "sgd",
        "max_grad_norm": CLIP, "logging_steps": 1, "report_to": "none", "bf16": False,
        "use_cpu": not backend.startswith("zero"),
        "save_strategy": "steps" if stop_at or resume else "no", "save_steps": stop_at or 500,
        "max_steps": -1, "seed": seed, "disable_tqdm": True, "dataloader_pin_memory": False,
        "ddp_backend": "gloo", "gradient_checkpointing": checkpointing,
    }  # fmt: skip
    arguments |= backend_arguments(backend)
    options = TrainerOptions(
        cost=profile_of(model),
        plan_fn=random_plans(seed, False),
        plan_ahead=0,
        recompute="off",
        measure=run is not None,
    )
    built = build(trainer, model, data, arguments, options, shard=backend == "fsdp2")
    if run is not None:
        built.add_callback(MdcpCallback(run))
        built.callback_handler.callbacks[-1].trainer = built
    if stop_at:
        built.add_callback(_Stop(stop_at))
    checkpoint = str(Path(output) / f"checkpoint-{resume}") if resume else None
    built.train(resume_from_checkpoint=checkpoint)
    engine = built.mdcp_engine
    sampler = built._mdcp_loader.sampler
    batches = [sampler.indices(k) for k in range(built.state.global_step)]
    losses, wanted = reference_run(stock, data, batches, CLIP)
    found = parameters_of(engine)
    logged = [h for h in built.state.log_history if "loss" in h]
    result = {
        "backend": engine.backend.name,
        "steps": int(built.state.global_step),
        "epoch": float(built.state.epoch),
        "error": max(float((found[n] - p).abs().max()) for n, p in wanted.items()),
        "losses": [h["loss"] for h in logged],
        "wanted": losses,
        "samples": batch,
        "metrics": sorted(k for k in logged[-1] if k.startswith("mdcp_")),
        "digest_of_batches": batches,
        "rate": [h["learning_rate"] for h in logged],
    }
    engine.world.close()
    return result


def build(
    kind: str,
    model: Any,
    data: Samples,
    arguments: dict[str, Any],
    options: TrainerOptions,
    *,
    shard: bool = False,
) -> Any:
    """The trainer a user would write: the mixin in front of a stock class.

    shard: let Accelerate shard with FSDP2, see `force_fsdp2`.
    """
    if kind == "transformers":
        from transformers import Trainer, TrainingArguments

        class Planned(MdcpTrainerMixin, Trainer):  # type: ignore[misc]
            def create_accelerator_and_postprocess(self) -> None:
                super().create_accelerator_and_postprocess()
                if shard:
                    force_fsdp2(self.accelerator)
                    self.is_fsdp_enabled = True

        return Planned(
            model=model, args=TrainingArguments(**arguments), train_dataset=data,
            data_collator=collate, mdcp=options,
        )  # fmt: skip
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    class PlannedSFT(MdcpTrainerMixin, SFTTrainer):  # type: ignore[misc]
        pass

    rows = Dataset.from_list(
        [{k: v.tolist() for k, v in data[i].items()} for i in range(len(data))]
    )
    return PlannedSFT(
        model=model, args=SFTConfig(**arguments, max_length=None), train_dataset=rows,
        processing_class=tiny_tokenizer(), mdcp=options,
    )  # fmt: skip


def collate(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A plain padding collator, as users have."""
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([x["input_ids"] for x in items], batch_first=True)
    labels = pad([x["labels"] for x in items], batch_first=True, padding_value=-100)
    mask = pad([torch.ones_like(x["input_ids"]) for x in items], batch_first=True)
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def tiny_tokenizer() -> Any:
    """A word-level tokenizer over the tiny vocabulary, made here: nothing is downloaded."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(64)}
    core = Tokenizer(models.WordLevel(words, unk_token="w3"))
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="w0", bos_token="w1", eos_token="w2", unk_token="w3"
    )


def backend_arguments(backend: str) -> dict[str, Any]:
    if not backend.startswith("zero"):
        return {}
    config = zero_config(backend, CLIP)
    config["train_micro_batch_size_per_gpu"] = "auto"
    return {"deepspeed": config}


def parameters_of(engine: Any) -> dict[str, Tensor]:
    """Whole parameters by their names in the Transformers model. Collective."""
    module = mdcp_module(engine)
    if engine.backend.name == "zero3":
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(module.parameters())):
            return {n: p.detach().clone() for n, p in module.named_parameters()}
    return {
        n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for n, p in module.named_parameters()
    }


def mdcp_module(engine: Any) -> nn.Module:
    module: nn.Module = engine.driver.module
    return module


def accelerate_case(*, seed: int, backend: str = "ddp", batch: int = 8) -> dict[str, Any]:
    """A loop of one's own with Accelerate-prepared model, optimizer and scheduler."""
    from accelerate import Accelerator

    from megatron_dcp.adapters.hf import initialize_accelerate

    launcher_environment(backend)
    reset_accelerate()
    data = Samples(random_lengths(seed, 3 * batch), seed, masked=0.2)
    stock = tiny_model("llama", seed=seed)
    model = copy.deepcopy(stock)
    prepared = prepare(model)
    accelerator = Accelerator(**accelerate_arguments(backend))
    if backend == "fsdp2":
        force_fsdp2(accelerator)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=100)
    wrapped, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    engine = initialize_accelerate(
        accelerator, wrapped, optimizer, scheduler,
        options=TrainerOptions(
            cost=profile_of(model), plan_fn=random_plans(seed, False), plan_ahead=0,
            recompute="off",
        ),
        max_grad_norm=None if backend.startswith("zero") else CLIP,
    )  # fmt: skip
    loader = engine.dataloader(
        data, global_batch_size=batch, lengths="lengths", seed=seed, batch_dim=True
    )
    losses = []
    for step in loader:
        for mb in step:
            mb.backward(microbatch_loss(prepared, engine.model, step, mb))
        losses.append(step.finish())
    batches = [loader.sampler.indices(k) for k in range(3)]
    expected, wanted = reference_run(stock, data, batches, CLIP)
    found = parameters_of(engine)
    raw = getattr(scheduler, "scheduler", scheduler)
    result = {
        "backend": engine.backend.name,
        "error": max(float((found[n] - p).abs().max()) for n, p in wanted.items()),
        "loss_error": max(abs(a - b) for a, b in zip(losses, expected, strict=True)),
        "scheduler_steps": int(raw.last_epoch),
    }
    engine.world.close()
    return result


def accelerate_arguments(backend: str) -> dict[str, Any]:
    if not backend.startswith("zero"):
        return {"cpu": True}
    from accelerate.utils import DeepSpeedPlugin

    return {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=zero_config(backend, CLIP))}


def force_fsdp2(accelerator: Any) -> None:
    """Accelerate shards only where it sees a GPU; switch its real FSDP2 path on for CPU ranks."""
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type="FULL_STATE_DICT",
    )
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    accelerator.state._shared_state.update(
        distributed_type=DistributedType.FSDP, fsdp_plugin=plugin
    )


def _Stop(at: int) -> Any:
    from transformers import TrainerCallback

    class Stop(TrainerCallback):  # type: ignore[misc]
        """Ends the run after step `at`, as an interruption would."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            if state.global_step >= at:
                control.should_training_stop = True
                control.should_save = True
            return control

    return Stop()


__all__ = ["accelerate_case", "mdcp", "trainer_case"]
