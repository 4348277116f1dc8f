"""One optimizer step: this rank's microbatches, and what ends it.

    for step in loader:
        for mb in step:
            loss_sum = loss_fn(model(**mb.inputs), mb.labels)
            mb.backward(loss_sum)
        loss = step.finish()

`loss_sum` is the sum over this rank's local tokens of weight times loss. `backward` divides it by
the denominator of the whole step (the sum of weights over all ranks), so that the gradient of the
step is the same under every plan. Rules are enforced: every microbatch is run backward once, in
order, before `finish`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_dcp.dispatch import Shard
from megatron_dcp.dist import (
    DataWorld,
    PlacementContext,
    gather_bytes,
    set_current,
    use_placement,
)
from megatron_dcp.errors import ConfigError, NonFiniteLossError
from megatron_dcp.plan import Placement, StepPlan
from megatron_dcp.runtime.schedule import Work

if TYPE_CHECKING:
    from megatron_dcp.runtime.attempt import Attempt
    from megatron_dcp.runtime.engine import Engine

_log = logging.getLogger("megatron_dcp")

# (step number, budget in bytes) -> plan, data set indices, this rank's work, denominator.
Replan = Callable[[int, int], tuple[StepPlan, list[int], list[tuple[Work, Shard]], float]]


class Microbatch:
    """One placement's shard on this rank. t rows: its tokens, or one filler where it has none.

    inputs: keyword arguments for the model, input_ids [t] and position_ids [t] and every payload of
    the data set; with `batch_dim=True` each has a leading dimension of 1. Per-sample fields come as
    they are, those of the placement's samples one after the other. labels [t] int64 (-100: nothing
    to predict), weights [t]: loss weight of each label, position_ids [t] int64.
    """

    def __init__(self, step: Step, work: Work, shard: Shard, *, batch_dim: bool) -> None:
        self._step, self._work, self._shard = step, work, shard
        self._batch_dim = batch_dim
        self.started_us = 0
        self.done = False
        self.loss_sum: Tensor | None = None

    def _view(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0) if self._batch_dim else x

    @property
    def inputs(self) -> dict[str, Tensor]:
        per_token = {n: self._view(x) for n, x in self._shard.inputs.items()}
        return {**per_token, **self._shard.whole}

    @property
    def labels(self) -> Tensor:
        return self._view(self._shard.labels)

    @property
    def weights(self) -> Tensor:
        return self._view(self._shard.weights)

    @property
    def position_ids(self) -> Tensor:
        return self._view(self._shard.context.position_ids)

    @property
    def placement(self) -> Placement:
        return self._work.placement

    @property
    def context(self) -> PlacementContext:
        return self._shard.context

    @property
    def dummy(self) -> bool:
        """A token without weight, run to keep ranks in step."""
        return self._work.dummy

    @property
    def closing(self) -> bool:
        """The dummy that ends a step, in which the wrapper reduces."""
        return self._work.closing

    @property
    def recompute(self) -> int:
        return self.placement.recompute

    @property
    def tokens(self) -> int:
        return self._shard.context.tokens

    def backward(self, loss_sum: Tensor) -> None:
        """Backward of loss_sum (a scalar) / denominator of the step; see the module docstring."""
        self._step.backward(self, loss_sum)

    def backward_output(self, output: Tensor, gradient: Tensor) -> None:
        """Backward of a pipeline stage without a loss.

        gradient, shaped as output: what the next stage's `mb.backward` left for its input; it is
        scaled already.
        """
        self._step.backward(self, (output * gradient).sum(), scaled=True)


class Step:
    """The microbatches of one optimizer step on this rank; iterate once, then `finish`.

    index: step number from 0. indices: dataset indices of its samples, in sample order. tokens: of
    the global batch, padding: what shape_quantum added. denominator: sum of loss weights over all
    ranks. After `finish`: loss, grad_norm (when clipping), metrics.
    """

    def __init__(
        self,
        engine: Engine,
        index: int,
        plan: StepPlan,
        indices: list[int],
        work: list[tuple[Work, Shard]],
        denominator: float,
        *,
        batch_dim: bool,
        padding: int = 0,
        on_finish: Callable[[Step], None] | None = None,
        replan: Replan | None = None,
    ) -> None:
        self._on_finish, self._replan, self._batch_dim = on_finish, replan, batch_dim
        self.padding = padding
        self.engine, self.index = engine, index
        self.finished = False
        self.loss: float | None = None
        self.grad_norm: float | None = None
        self.metrics: dict[str, Any] = {}
        self.attempt: Attempt | None = None
        self._set(plan, indices, work, denominator)

    def _set(
        self, plan: StepPlan, indices: list[int], work: list[tuple[Work, Shard]], denominator: float
    ) -> None:
        self.plan, self.indices, self.denominator = plan, indices, denominator
        self.microbatches = [Microbatch(self, w, s, batch_dim=self._batch_dim) for w, s in work]
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self.engine.world.device)
        self.losses = 0  # microbatches of this rank that had a loss
        self._started_us = 0
        self._events = len(self.engine.log.events)

    def forget(self) -> None:
        """Let go of the microbatches of a broken attempt, with their tensors and events."""
        self.microbatches = []
        del self.engine.log.events[self._events :]

    def again(self, budget_bytes: int) -> None:
        """Plan the same samples once more, within a smaller budget. Collective."""
        assert self._replan is not None
        self._set(*self._replan(self.index, budget_bytes))
        self.metrics["out_of_memory"] = self.metrics.get("out_of_memory", 0) + 1

    def run(self, loss_fn: Callable[[Microbatch], Tensor]) -> float:
        """Run every microbatch and finish: the loop of this module's docstring in one call.

        loss_fn(mb) returns the loss sum. Where memory runs out before other ranks depend on this
        one, the step is planned again with a smaller budget, from the same samples, and started
        over (see `attempt`); else OutOfMemoryError. Returns the loss of the global batch.
        Collective; all ranks of a job use it, or none.
        """
        from megatron_dcp.runtime.attempt import run_step

        return run_step(self, loss_fn)

    @property
    def tokens(self) -> int:
        return self.plan.workload.tokens - self.padding

    def __len__(self) -> int:
        return len(self.microbatches)

    def __iter__(self) -> Iterator[Microbatch]:
        self._start()
        for i, mb in enumerate(self.microbatches):
            self._begin(i, mb)
            try:
                yield mb
            finally:
                set_current(None)
            if not mb.done:
                raise ConfigError(
                    f"step {self.index}: microbatch {i} was not run backward; call "
                    "mb.backward(loss_sum) once for every microbatch, dummies included"
                )

    def _start(self) -> None:
        if self._started_us:
            raise ConfigError(f"step {self.index} was iterated twice; its samples run only once")
        self._started_us = self.engine.log.begin_step()
        self.engine.open_step = self.index
        closing = sum(mb.closing for mb in self.microbatches)
        self.engine.driver.begin(len(self.microbatches) - closing)

    def _begin(self, index: int, mb: Microbatch) -> None:
        log, p = self.engine.log, mb.placement
        if self.attempt is not None:
            self.attempt.enter(mb)
        self.engine.beat("placement", self.plan, self.index, p)
        if log.measure and p.degree > 1:
            begin = log.clock()
            self.engine.world.rendezvous(p.first_rank, p.degree)
            log.add_placement("wait", begin, log.clock(), p)
        self.engine.driver.before(index)
        if self.attempt is not None:
            self.attempt.arm()
        set_current(mb.context)
        mb.started_us = log.clock()

    def backward(self, mb: Microbatch, loss_sum: Tensor, *, scaled: bool = False) -> None:
        """Scale, run backward under the microbatch's placement, and count its loss."""
        self._check_loss(mb, loss_sum)
        self._warn_unattended(mb)
        engine = self.engine
        if self.attempt is not None:
            self.attempt.forward_done(mb)
        if mb.dummy:
            loss = engine.dummy_loss(loss_sum)
        elif scaled:
            loss = loss_sum
        elif mb.context.filler:
            loss = loss_sum * 0.0
        else:
            loss = loss_sum * self._scale()
            if engine.scaler is not None:
                loss = engine.scaler.scale(loss)
            self._loss_sum += loss_sum.detach().double()
            mb.loss_sum = loss_sum.detach()
            self.losses += 1
        with use_placement(mb.context):
            if mb.closing:
                engine.driver.end(lambda: loss)
            else:
                engine.driver.backward(loss)
        mb.done = True
        log = engine.log
        log.add_placement(
            "placement",
            mb.started_us,
            log.clock(),
            mb.placement,
            recompute=mb.recompute,
            tokens=0 if mb.dummy else self.plan.tokens_of(mb.placement),
        )

    def _scale(self) -> float:
        if not self.denominator:
            return 0.0  # no label of the step has weight: its gradient is zero
        return self.engine.driver.scale / self.denominator

    def _check_loss(self, mb: Microbatch, loss_sum: Tensor) -> None:
        if mb.done:
            raise ConfigError(f"step {self.index}: mb.backward was called twice on a microbatch")
        if loss_sum.numel() != 1 or not loss_sum.requires_grad:
            raise ConfigError(
                f"mb.backward needs a scalar with a graph, found shape {tuple(loss_sum.shape)}, "
                f"requires_grad={loss_sum.requires_grad}; pass the sum over local tokens "
                "(reduction='sum')"
            )

    def _warn_unattended(self, mb: Microbatch) -> None:
        """Say once that a model mixes tokens by itself, or not at all: only the user can tell."""
        ctx, engine = mb.context, self.engine
        alone = ctx.degree == 1 and len(ctx.placement.samples) == 1
        if ctx.attended or mb.dummy or alone or engine.told_unattended:
            return
        engine.told_unattended = True
        _log.warning(
            "step %d: the forward of %d samples on %d ranks did not call mdcp.attention. That is "
            "right for a model that takes tokens one by one; one with attention of its own would "
            "mix the samples of a pack and miss the tokens of other ranks. Call mdcp.attention "
            "there, or prepare a Transformers model (megatron_dcp.adapters.hf.prepare)",
            self.index, len(ctx.placement.samples), ctx.degree,
        )  # fmt: skip

    def finish(self) -> float:
        """Reduce, clip, step the optimizer and scheduler, zero the gradients.

        Returns the loss of the global batch, the same number on all ranks.
        """
        if self.finished:
            raise ConfigError(f"step {self.index} was finished twice")
        left = [i for i, mb in enumerate(self.microbatches) if not mb.done]
        if left or (not self._started_us and self.microbatches):
            raise ConfigError(
                f"step {self.index}: microbatches {left} have not been run; iterate the whole "
                "step before finish()"
            )
        if not self._started_us:
            self._start()
        if self.attempt is not None:
            self.attempt.before_reduction()
        self.engine.finish_step(self, self._loss_sum, self._started_us)
        self.finished = True
        if self._on_finish is not None:
            self._on_finish(self)
        assert self.loss is not None
        return self.loss


def raise_non_finite(world: DataWorld, step: Step) -> None:
    """Every rank raises alike, naming the samples whose microbatch gave a loss that is no number.

    Raised before clipping and the optimizer, so that parameters are still those of the step before.
    """
    mine = [
        f"slot {mb.placement.slot}, block from rank {mb.placement.first_rank}: data set samples "
        f"{[step.indices[i] for i in mb.placement.samples]}"
        for mb in step.microbatches
        if mb.loss_sum is not None and not bool(torch.isfinite(mb.loss_sum))
    ]
    texts = [b.decode() for b in gather_bytes(world, "; ".join(mine).encode())]
    named = "; ".join(dict.fromkeys(t for t in texts if t))
    raise NonFiniteLossError(
        f"step {step.index}: the loss is not finite in {named or 'no single microbatch'}; the "
        "optimizer was not stepped. Look at these samples, or lower the learning rate."
    )
