"""The engine: one model, one optimizer, and the steps that loaders hand out.

It owns the data world, the backend, the planning settings and the end of a step. It captures no
group: attention, positions and loss read the placement that is current.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_dcp.config import PlannerConfig, RuntimeConfig, check_at_least
from megatron_dcp.cost import CostModel, CostProfile, budget_bytes
from megatron_dcp.dispatch import ReadOptions
from megatron_dcp.dist import DataWorld, PlanPost
from megatron_dcp.errors import ConfigError
from megatron_dcp.plan import Placement, StepPlan, Topology, lockstep_ranks
from megatron_dcp.planner import PlanRequest, check_strategy, make_plan
from megatron_dcp.runtime.autocost import cost_mark, same_cost
from megatron_dcp.runtime.backend import Backend, touch
from megatron_dcp.runtime.driver import make_driver
from megatron_dcp.runtime.ema import Ema
from megatron_dcp.runtime.eventlog import EventLog
from megatron_dcp.runtime.gates import Gates
from megatron_dcp.runtime.loader import StepLoader
from megatron_dcp.runtime.oom import agreed_limit
from megatron_dcp.runtime.preempt import StopFlag
from megatron_dcp.runtime.prepare import PlanFn, PlanSettings
from megatron_dcp.runtime.recompute import find_layers, wrap_layers
from megatron_dcp.runtime.sampler import Remainder
from megatron_dcp.runtime.scaling import unscale, usable_scaler
from megatron_dcp.runtime.step import Step, raise_non_finite
from megatron_dcp.runtime.watchdog import IDLE, Watchdog


class Engine:
    """Made by `mdcp.initialize`; see there for the arguments.

    world: data ranks, wire and groups. profile: the cost profile in use. topology. log: events.
    events: list of measured events when `measure` is on (see `observe.events`); `take_events()`
    hands them over.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        scheduler: Any,
        scaler: Any = None,
        backend: Backend,
        world: DataWorld,
        profile: CostProfile,
        planner: PlannerConfig,
        runtime: RuntimeConfig,
        ranks_per_node: int | None = None,
        plan_fn: PlanFn | None = None,
        stage_group: Any = None,
    ) -> None:
        self.stage_group = stage_group
        self.post = PlanPost(world) if len(world.planes) > 1 else None
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.backend, self.world, self.profile = backend, world, profile
        group = world.group if world.size > 1 else None
        self.driver = make_driver(
            backend, model, optimizer, group=group, all_reduce=self._all_reduce,
            float32_gradients=runtime.float32_gradients,
        )  # fmt: skip
        # In the last backward of a stage, others wait for what it sends on: a reduction there would
        # wait for a rank that waits for that.
        self.driver.never_in_backward = stage_group is not None
        self.scaler = usable_scaler(scaler, optimizer, model)
        decay = runtime.ema_decay
        self.ema = None if decay is None else Ema(self.driver.module, decay)
        self.planner, self.runtime = planner, runtime
        self.topology = Topology(
            data_ranks=world.size,
            ranks_per_node=node_ranks(ranks_per_node, world.size),
            pipeline_stages=1 if stage_group is None else dist.get_world_size(stage_group),
        )
        needed = lockstep_ranks(backend.needed_lockstep, self.topology)
        auto = planner.lockstep == "auto"
        self.lockstep = needed if auto else lockstep_ranks(planner.lockstep, self.topology)
        if self.lockstep % needed:
            raise ConfigError(
                f"lockstep {planner.lockstep!r} asked, but {backend.name} gathers parameters over "
                f"{needed} ranks in every microbatch; use lockstep='auto' or 'all'"
            )
        self.log = EventLog(world, measure=runtime.measure)
        if plan_fn is None:
            check_strategy(planner.strategy, self.topology)
        self.plan_fn = plan_fn or self._strategy_plan
        self.watchdog: Watchdog | None = None
        if runtime.watchdog_s is not None:
            self.watchdog = Watchdog(
                world, timeout_s=runtime.watchdog_s, directory=runtime.watchdog_dir
            )
        self._stop_flag: StopFlag | None = None
        self.stop_requested = False
        self.open_step: int | None = None  # begun and not finished
        self.told_unattended = False
        self._gates: Gates | None = None
        self.budget_limit = agreed_limit(world)

    def _all_reduce(self, x: Tensor) -> Tensor:
        return self.world.wire.all_reduce(x, self.world.group)

    def dummy_loss(self, loss: Tensor) -> Tensor:
        """A dummy's loss: exactly 0, its graph through every trainable parameter.

        A plain module's ranks wait for no parameter: one that is left out has no gradient. FSDP2
        shards parameters outside forward; there the dummy's own forward must reach them. DDP
        with `find_unused_parameters` counts those that it did not reach itself, and twice is an
        error.
        """
        zero = loss * 0.0
        counted = getattr(self.model, "find_unused_parameters", False)
        if counted or not self.backend.reduces or "parameters" in self.backend.sharded:
            return zero
        return zero + touch(self.driver.module).to(zero)

    @property
    def events(self) -> list[dict[str, Any]]:
        return self.log.events

    def take_events(self) -> list[dict[str, Any]]:
        """The events since the last call."""
        return self.log.take()

    def wrap_layers(
        self,
        layers: Sequence[nn.Module] | nn.ModuleList | None = None,
        *,
        attention: str | None = None,
    ) -> int:
        """Let plans recompute these transformer layers (default: found in the model).

        attention: name of the attention module inside a layer, for plans that recompute it alone.
        Returns how many there are. A plan that recomputes layers wraps them by itself.
        """
        found = layers if layers is not None else find_layers(self.driver.module)
        if found is None:
            raise ConfigError(
                f"no list of equal layers found in {type(self.model).__name__}; pass the "
                "transformer layers: engine.wrap_layers(model.layers)"
            )
        return wrap_layers(found, attention=attention)

    def handle_preemption(self) -> None:
        """Let SIGTERM and SIGUSR1 ask for the end: see `stop_requested`. Main thread only.

        After the step in which any rank was signalled `stop_requested` is true on all ranks: write
        a checkpoint and leave.
        """
        if self._stop_flag is None:
            self._stop_flag = StopFlag()

    def close(self) -> None:
        """Stop the watchdog, give signals back and destroy the groups made here."""
        if self.watchdog is not None:
            self.watchdog.close()
        if self._stop_flag is not None:
            self._stop_flag.close()
        self.world.close()

    def beat(
        self, phase: str, plan: StepPlan | None = None, step: int = -1,
        placement: Placement | None = None,
    ) -> None:  # fmt: skip
        """Tell the watchdog, where there is one, how far this rank has come."""
        if self.watchdog is not None:
            self.watchdog.beat(phase, plan, step, placement)

    def _strategy_plan(self, request: PlanRequest) -> StepPlan:
        return make_plan(request, self.planner.strategy)

    def use_cost(self, profile: CostProfile) -> None:
        """Plan with another cost profile from now on; the same one on every rank.

        A loader takes it when it is iterated again, so leave the loop over it first: steps that
        are already planned ahead keep the old one.
        """
        self.profile = profile

    @property
    def gates(self) -> Gates:
        """Where ranks meet in `step.run`. Collective when first used."""
        if self._gates is None:
            self._gates = Gates(self.world)
        return self._gates

    @property
    def cost_model(self) -> CostModel:
        return CostModel(self.profile, self.topology, self.lockstep)

    def limit_budget(self, budget_bytes: int) -> None:
        """Plan with at most so many bytes per rank from now on; all ranks alike."""
        self.budget_limit = min(budget_bytes, self.budget_limit or budget_bytes)

    @property
    def settings(self) -> PlanSettings:
        """What the plans of this engine's loaders depend on, besides lengths."""
        gigabytes = self.planner.memory_gb
        budget = self.profile.budget_bytes if gigabytes is None else budget_bytes(gigabytes)
        if self.budget_limit is not None:
            budget = min(budget, self.budget_limit)
        return PlanSettings(
            topology=self.topology,
            profile=self.profile,
            lockstep=self.lockstep,
            budget_bytes=budget,
            recompute=self.planner.recompute == "auto",
            oversize=self.planner.oversize,
        )

    def dataloader(
        self,
        dataset: Any,
        *,
        global_batch_size: int,
        lengths: Any = "length",
        lengths_cache: str | Path | None = None,
        shapes: Any = None,
        steps: int | None = None,
        epochs: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        window: int | None = None,
        remainder: Remainder = "drop",
        max_length: int | None = None,
        shape_quantum: int = 0,
        tokens: str = "input_ids",
        shift_labels: bool = True,
        batch_dim: bool = False,
        per_sample: Sequence[str] = (),
    ) -> StepLoader:
        """Steps over a data set that every rank can read; each rank reads only its own samples.

        An item must be a function of its index: the ranks that share a sample each read it.
        lengths: a list, a function of the index, or a name (attribute, column or item key).
        lengths_cache: a file for lengths that have to be measured by reading the items; the ranks
        share the work, and later runs read the file. A data set without length and index is
        iterated: `window` samples (default 16 batches) are shuffled among each other and read ahead
        of the steps, lengths is then a field or a function of the item (default: count its
        tokens), and the loader ends with the data.
        shapes: likewise (frames, height, width) of every sample, in tokens, for video and image
        models; their product is the length. Samples are then never cut.
        steps: how many optimizer steps, default `epochs` epochs. remainder: `drop` or `short`.
        max_length: longer samples are cut to it. tokens: name of the token ids, which are also the
        labels where an item has none. shift_labels: label[t] is the token at t + 1. batch_dim: give
        tensors a leading dimension of 1, as Transformers models expect. shape_quantum: pad samples
        to a multiple of so many tokens before planning (0: off), for fewer shapes under
        torch.compile; causal attention keeps it from real tokens. per_sample: names of fields
        that belong to the whole sample (images): every rank of its block gets them uncut.
        """
        for name, value, least in (("steps", steps, 0), ("epochs", epochs, 0),
                                   ("max_length", max_length, 1),
                                   ("shape_quantum", shape_quantum, 0)):  # fmt: skip
            check_at_least(name, value, least)
        from megatron_dcp.runtime.loading import make_loader

        read = ReadOptions(
            tokens=tokens,
            shift=shift_labels,
            normalize=self.runtime.normalize,
            per_sample=tuple(per_sample),
        )
        return make_loader(
            self,
            dataset,
            batch=global_batch_size,
            lengths=lengths,
            lengths_cache=lengths_cache,
            shapes=shapes,
            steps=steps,
            epochs=epochs,
            seed=seed,
            shuffle=shuffle,
            window=window,
            remainder=remainder,
            max_length=max_length,
            shape_quantum=shape_quantum,
            read=read,
            batch_dim=batch_dim,
        )

    def finish_step(self, step: Step, loss_sum: Tensor, started_us: int) -> None:
        """Called by `step.finish()`: the end of a step, in its one order."""
        log, world = self.log, self.world
        self.beat("reduce", step=step.index)
        if log.measure and world.size > 1:
            begin = log.clock()
            world.rendezvous(0, world.size)
            log.add("wait", begin, log.clock())
        if not self.backend.closing_dummy:  # else the closing dummy's backward has done it
            self.driver.end()
        stop = self._stop_flag is not None and self._stop_flag.raised
        totals = torch.stack(
            (loss_sum, torch.full_like(loss_sum, float(stop)), loss_sum.new_tensor(step.losses > 0))
        )
        if world.size > 1:
            totals = world.wire.all_reduce(totals, world.group)
        if self.post is not None:
            totals = self._over_planes(totals)
        self.stop_requested = bool(totals[1] > 0)
        if not bool(torch.isfinite(totals[0])):
            raise_non_finite(world, step)
        begin = log.clock()
        self._update(step)
        log.add("optimizer", begin, log.clock())
        log.end_step(started_us, tokens=step.tokens, groups=world.communicators)
        self.beat(IDLE, step=step.index)
        step.loss = float(totals[0]) / step.denominator if step.denominator else 0.0
        self.open_step = None

    def forget_open_step(self) -> None:
        """Drop the gradients of a step that an exception broke off; they are no part of the next.

        Raises ConfigError where the wrapper keeps them out of reach.
        """
        index, self.open_step = self.open_step, None
        if index is None:
            return
        if self.backend.name not in ("bare", "ddp", "fsdp2"):
            raise ConfigError(
                f"step {index} was broken off, and {self.backend.name} cannot drop its gradients; "
                "start again from the last checkpoint"
            )
        self.driver.drop()

    def _over_planes(self, totals: Tensor) -> Tensor:
        """The mean loss of the planes that have one (the last pipeline stage's), any stop request.

        Equal on all processes: planes of one TP group have the same loss, stages before the last
        have none.
        """
        has = float(totals[2] > 0)
        share = torch.stack((totals[0] * has, totals[1], totals.new_tensor(has)))
        dist.all_reduce(share, group=self.world.everyone)
        planes = share[2].clamp(min=1.0)
        return torch.stack((share[0] / planes, share[1], share[2]))

    def _over_stages(self, squares: Tensor) -> Tensor:
        dist.all_reduce(squares, group=self.stage_group)
        return squares

    def _update(self, step: Step) -> None:
        """Unscale, clip, step: once per step; an overflow of the scaler skips it on all ranks."""
        if self.scaler is not None:
            step.metrics["skipped"] = int(unscale(self.scaler, self.optimizer, self.world))
        if self.runtime.max_grad_norm is not None:
            stages = None if self.stage_group is None else self._over_stages
            step.grad_norm = float(self.driver.clip(self.runtime.max_grad_norm, stages))
        self.driver.settle()
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.driver.clear()
            if step.metrics["skipped"]:
                return
        elif self.driver.optimizer is not None:
            self.driver.step()
        if self.scheduler is not None:
            self.scheduler.step()
        if self.ema is not None:
            self.ema.update()

    def state_dict(self) -> dict[str, Any]:
        """What the plans of a resumed run depend on: strategy, cost profile, lowered budget."""
        return {
            "strategy": self.planner.strategy,
            "cost": cost_mark(self.profile, self.topology, self.backend),
            "budget_limit": self.budget_limit,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Refuse to go on with another strategy or cost profile: plans would differ."""
        mine = self.state_dict()
        cost = same_cost(state.get("cost") or {}, mine["cost"])
        same = {"strategy": state.get("strategy") == mine["strategy"], "cost": cost}
        wrong = [k for k, equal in same.items() if not equal]
        if wrong:
            raise ConfigError(
                "the checkpoint was written with "
                + ", ".join(f"{k} {state.get(k)!r} (now {mine[k]!r})" for k in wrong)
                + "; resume with the same, or start a new run"
            )
        if (limit := state.get("budget_limit")) is not None:
            self.limit_budget(int(limit))


def node_ranks(asked: int | None, size: int) -> int:
    """As asked, else the launcher's LOCAL_WORLD_SIZE where it tiles the ranks, else one node."""
    if asked is not None:
        return asked
    local = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    return local if 1 <= local <= size and size % local == 0 else size
