"""`MdcpTrainerMixin`: `transformers.Trainer` and TRL's `SFTTrainer` under a per-step plan.

    class PlannedTrainer(MdcpTrainerMixin, Trainer): ...

The Trainer keeps its loop, callbacks, optimizer, scheduler, clipping, logging and checkpoints. The
mixin gives it a loader of one item per optimizer step and a `training_step` that runs the whole
step: all microbatches of this rank, with gradients summed over ranks when it returns. The samples
of a step are `per_device_train_batch_size * gradient_accumulation_steps * ranks` of a global
shuffle, as the stock Trainer counts them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import megatron_dcp as mdcp
from megatron_dcp.adapters.hf.callback import MdcpCallback
from megatron_dcp.adapters.hf.data import CollatedDataset, StepNumbers, step_batch, token_counts
from megatron_dcp.adapters.hf.loss_step import microbatch_loss
from megatron_dcp.adapters.hf.options import TrainerOptions
from megatron_dcp.adapters.hf.prepare import Prepared, prepare
from megatron_dcp.adapters.hf.vision import PER_SAMPLE, ImageSamples
from megatron_dcp.errors import AdapterError, ConfigError

log = logging.getLogger("megatron_dcp")


class MdcpTrainerMixin:
    """Put before the Trainer class. `mdcp`: TrainerOptions or a mapping of its fields."""

    def __init__(
        self, *args: Any, mdcp: TrainerOptions | dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        self.mdcp_options = _options(mdcp)
        super().__init__(*args, **kwargs)
        trainer: Any = self
        _check_arguments(trainer)
        steps = int(trainer.args.gradient_accumulation_steps)
        self.mdcp_batch = int(trainer.args.train_batch_size) * steps * _data_ranks()
        if steps > 1:
            log.info(
                "gradient_accumulation_steps %d is counted into global batches of %d samples; "
                "the plan decides the microbatches",
                steps,
                self.mdcp_batch,
            )
            trainer.args.gradient_accumulation_steps = 1
        self.mdcp_prepared: Prepared = prepare(
            trainer.model,
            fused_loss=self.mdcp_options.fused_loss,
            allow_dropout=self.mdcp_options.allow_dropout,
        )
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, MdcpCallback):
                callback.trainer = self
        self.mdcp_engine: Any = None
        self._mdcp_loader: Any = None
        self._mdcp_source: Any = None
        self._mdcp_steps: Iterator[Any] | None = None
        self._mdcp_last: Any = None
        self._mdcp_drawn = 0

    def get_train_dataloader(self) -> torch.utils.data.DataLoader[int]:
        """One item per optimizer step; not prepared by Accelerate: ranks do not split it."""
        trainer: Any = self
        if trainer.train_dataset is None:
            raise ConfigError("training needs a train_dataset")
        if not hasattr(trainer.train_dataset, "__len__"):
            raise AdapterError(
                f"{type(trainer.train_dataset).__name__} has no length; plans need a data set with "
                "random access and known lengths"
            )
        whole, rest = divmod(len(trainer.train_dataset), self.mdcp_batch)
        steps = whole + int(bool(rest) and not trainer.args.dataloader_drop_last)
        if not steps:
            raise ConfigError(
                f"{len(trainer.train_dataset)} samples make no global batch of {self.mdcp_batch}; "
                "lower per_device_train_batch_size or set dataloader_drop_last=False"
            )
        return torch.utils.data.DataLoader(
            StepNumbers(steps), batch_size=1, shuffle=False, collate_fn=step_batch
        )

    def num_examples(self, dataloader: Any) -> int:
        """Samples, not steps."""
        trainer: Any = self
        if isinstance(getattr(dataloader, "dataset", None), StepNumbers):
            return len(trainer.train_dataset)
        counted: int = super().num_examples(dataloader)  # type: ignore[misc]
        return counted

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """Run one optimizer step's microbatches; returns the loss of the global batch."""
        trainer: Any = self
        model.train()
        if callable(getattr(trainer.optimizer, "train", None)):
            trainer.optimizer.train()
        step = self._mdcp_next(model)
        for mb in step:
            with trainer.compute_loss_context_manager():
                loss = self.mdcp_loss(model, step, mb)
            mb.backward(loss)
        value = step.finish()
        self._mdcp_last = step
        return torch.tensor(value, device=trainer.args.device)

    def mdcp_loss(self, model: nn.Module, step: Any, mb: Any) -> Tensor:
        """Weighted sum of token losses of a microbatch; override for a loss of your own."""
        return microbatch_loss(self.mdcp_prepared, model, step, mb)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Adds what the last step's plan says to the Trainer's own logs."""
        if self._mdcp_last is not None and "loss" in logs:
            logs.update(step_metrics(self._mdcp_last))
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def floating_point_ops(self, inputs: Any) -> int:
        """Six per parameter and token of the global batch, over the ranks (attention left out)."""
        trainer: Any = self
        if self._mdcp_last is None or "mdcp_step" not in inputs:
            counted: int = super().floating_point_ops(inputs)  # type: ignore[misc]
            return counted
        parameters = sum(p.numel() for p in trainer.model.parameters())
        tokens = int(self._mdcp_last.tokens)
        return 6 * int(parameters) * tokens // _data_ranks()

    def _track_num_input_tokens(self, inputs: Any) -> None:
        trainer: Any = self
        if trainer.args.include_num_input_tokens_seen != "no" and self._mdcp_last is not None:
            trainer.state.num_input_tokens_seen += self._mdcp_last.tokens

    def _mdcp_next(self, model: nn.Module) -> Any:
        """The step after `global_step` finished ones; a resume or a new epoch starts there too."""
        trainer: Any = self
        if self.mdcp_engine is None or self.mdcp_engine.model is not model:
            self._mdcp_start(model)
        if (  # a second `train()` may have another end or another data set
            self._mdcp_loader is None
            or self._mdcp_loader.steps != trainer.state.max_steps
            or self._mdcp_source is not trainer.train_dataset
        ):
            self._mdcp_load()
        if (
            self._mdcp_steps is None
            or self._mdcp_loader.position + self._mdcp_drawn != trainer.state.global_step
        ):
            self._mdcp_loader.position = int(trainer.state.global_step)
            self._mdcp_steps = iter(self._mdcp_loader)
            self._mdcp_drawn = 0
        step = next(self._mdcp_steps)
        self._mdcp_drawn = 1  # the loader counts a step when the next one is drawn
        return step

    def _mdcp_start(self, model: nn.Module) -> None:
        self.mdcp_engine = mdcp.initialize(model, None, **self.mdcp_options.engine_arguments())
        self._mdcp_loader = None

    def _mdcp_load(self) -> None:
        trainer: Any = self
        dataset = trainer.train_dataset
        if hasattr(dataset, "column_names"):
            dataset = trainer._remove_unused_columns(dataset, description="Training")
        seed = trainer.args.data_seed if trainer.args.data_seed is not None else trainer.args.seed
        samples: Any = CollatedDataset(dataset, trainer.data_collator)
        if self.mdcp_prepared.images is not None:
            samples = CollatedDataset(dataset, trainer.data_collator, PER_SAMPLE)
            samples = ImageSamples(samples, self.mdcp_prepared.model)
        self._mdcp_loader = self.mdcp_engine.dataloader(
            samples,
            global_batch_size=self.mdcp_batch,
            lengths=token_counts(trainer.train_dataset, trainer.args.length_column_name),
            steps=int(trainer.state.max_steps),
            seed=int(seed),
            shuffle=trainer.args.train_sampling_strategy != "sequential",
            remainder="drop" if trainer.args.dataloader_drop_last else "short",
            max_length=self.mdcp_options.max_length,
            batch_dim=True,
            per_sample=getattr(samples, "per_sample", ()),
        )
        self._mdcp_source = trainer.train_dataset
        self._mdcp_steps = None
        self._mdcp_drawn = 0


def step_metrics(step: Any) -> dict[str, float]:
    """Numbers of a finished step's plan, for logs."""
    plan = step.plan
    busy = sum(p.time_us * p.degree for p in plan.placements)
    ranks = plan.topology.data_ranks
    return {
        "mdcp_tokens": float(step.tokens),
        "mdcp_microbatches": float(len(step)),
        "mdcp_placements": float(len(plan.placements)),
        "mdcp_predicted_ms": plan.makespan_us / 1e3,
        "mdcp_idle": 1.0 - busy / (ranks * plan.makespan_us) if plan.makespan_us else 0.0,
        "mdcp_plan_ms": step.metrics.get("plan_us", 0) / 1e3,
        "mdcp_planner_exposed_ms": float(step.metrics.get("planner_exposed_ms", 0.0)),
    }


def _data_ranks() -> int:
    """Ranks that share the data. Not Accelerate's count: on CPU it is 1 under DeepSpeed."""
    return dist.get_world_size() if dist.is_initialized() else 1


def _options(value: TrainerOptions | dict[str, Any] | None) -> TrainerOptions:
    if isinstance(value, TrainerOptions):
        return value
    known = {f.name for f in fields(TrainerOptions)}
    unknown = sorted(set(value or {}) - known)
    if unknown:
        raise ConfigError(f"mdcp options {unknown} are unknown; known: {sorted(known)}")
    return TrainerOptions(**(value or {}))


def _bypassed(trainer: Any) -> list[str]:
    """Overrides of the stock loss and step that training would silently leave out."""
    classes = type(trainer).__mro__
    wrong: list[str] = []
    loss = _owner(classes, "compute_loss")
    if type(trainer).mdcp_loss is MdcpTrainerMixin.mdcp_loss and not _stock(loss):
        wrong.append(
            f"{loss.__name__}.compute_loss: a step does not call it; override "
            "mdcp_loss(model, step, mb) with that loss as a sum over local tokens"
        )
    step = _owner(classes[classes.index(MdcpTrainerMixin) + 1 :], "training_step")
    if not _stock(step):
        wrong.append(
            f"{step.__name__}.training_step: the mixin's replaces it; put it into a class before "
            "MdcpTrainerMixin and let it call super().training_step"
        )
    return wrong


def _owner(classes: tuple[type, ...], method: str) -> type:
    return next(c for c in classes if method in vars(c))


def _stock(owner: type) -> bool:
    """Whether a class is one of those whose loss and step the mixin stands in for."""
    module = owner.__module__
    return module.startswith("transformers.") or module == "trl.trainer.sft_trainer"


def _check_arguments(trainer: Any) -> None:
    """Refuse settings whose meaning a plan would change, naming each."""
    args = trainer.args
    wrong = _bypassed(trainer)
    if getattr(args, "activation_offloading", False):
        wrong.append(
            "activation_offloading=True: it acts in TRL's training_step, which the mixin replaces; "
            "leave it out, the plan recomputes where memory is short"
        )
    if args.neftune_noise_alpha is not None:
        wrong.append(
            f"neftune_noise_alpha={args.neftune_noise_alpha}: its noise is scaled by the rows that "
            "share a microbatch and drawn per microbatch; leave it out"
        )
    if getattr(args, "packing", False):
        wrong.append("packing=True: the planner packs; set packing=False")
    if getattr(args, "loss_type", "nll") != "nll":
        wrong.append(f"loss_type={args.loss_type!r}: use 'nll' or override mdcp_loss")
    if args.label_smoothing_factor:
        wrong.append("label_smoothing_factor: set it to 0 or override mdcp_loss")
    if trainer.compute_loss_func is not None:
        wrong.append("compute_loss_func: override mdcp_loss instead")
    if args.train_sampling_strategy in ("group_by_length", "batch_rebalance"):
        wrong.append(
            f"train_sampling_strategy={args.train_sampling_strategy!r}: it chooses samples by "
            "length; plans balance any batch, use 'random'"
        )
    if args.fp16 and not trainer.is_deepspeed_enabled:
        wrong.append("fp16=True: use bf16=True (no loss scaling needed) or DeepSpeed's fp16")
    if trainer.is_deepspeed_enabled and int(args.gradient_accumulation_steps) != 1:
        wrong.append(
            f"gradient_accumulation_steps={args.gradient_accumulation_steps} under DeepSpeed: set "
            "it to 1 and raise per_device_train_batch_size instead"
        )
    for name, size in (
        ("tp", trainer.get_tp_size()),
        ("cp", trainer.get_cp_size()),
        ("sp", trainer.get_sp_size()),
    ):
        if size > 1:
            wrong.append(f"{name}_size={size}: sequences are shared per sample by the plan; set 1")
    if args.auto_find_batch_size:
        wrong.append("auto_find_batch_size=True: give the planner a memory budget instead")
    if wrong:
        raise AdapterError("MdcpTrainerMixin cannot run with " + "; ".join(wrong))
