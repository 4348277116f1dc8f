"""The engine: one model, one optimizer, and the steps that loaders hand out.

It owns the data world, the backend, the planning settings and the end of a step. It captures no
group: attention, positions and loss read the placement that is current.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron_dcp.config import PlannerConfig, RuntimeConfig, check_at_least
from megatron_dcp.cost import CostProfile, budget_bytes
from megatron_dcp.dispatch import Dataset, ReadOptions
from megatron_dcp.dist import DataWorld
from megatron_dcp.errors import ConfigError
from megatron_dcp.plan import Placement, StepPlan, Topology, lockstep_ranks
from megatron_dcp.planner import PlanRequest, make_plan
from megatron_dcp.planner.registry import find_strategy
from megatron_dcp.runtime.backend import Backend, touch
from megatron_dcp.runtime.driver import make_driver
from megatron_dcp.runtime.eventlog import EventLog
from megatron_dcp.runtime.lengths import dataset_lengths, dataset_shapes
from megatron_dcp.runtime.loader import StepLoader
from megatron_dcp.runtime.preempt import StopFlag
from megatron_dcp.runtime.prepare import PlanFn, PlanSettings, StepPreparer
from megatron_dcp.runtime.recompute import find_layers, wrap_layers
from megatron_dcp.runtime.sampler import GlobalSampler, Remainder, SamplerConfig
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
        backend: Backend,
        world: DataWorld,
        profile: CostProfile,
        planner: PlannerConfig,
        runtime: RuntimeConfig,
        ranks_per_node: int | None = None,
        plan_fn: PlanFn | None = None,
    ) -> None:
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.backend, self.world, self.profile = backend, world, profile
        group = world.group if world.size > 1 else None
        self.driver = make_driver(
            backend, model, optimizer, group=group, all_reduce=self._all_reduce
        )
        self.planner, self.runtime = planner, runtime
        self.topology = Topology(
            data_ranks=world.size, ranks_per_node=node_ranks(ranks_per_node, world.size)
        )
        wanted = backend.lockstep if planner.lockstep == "auto" else planner.lockstep
        self.lockstep = lockstep_ranks(wanted, self.topology)
        if backend.lockstep == "all" and self.lockstep != world.size:
            raise ConfigError(
                f"lockstep {planner.lockstep!r} asked, but {backend.name} gathers parameters over "
                "all ranks in every microbatch; use lockstep='auto' or 'all'"
            )
        self.log = EventLog(world, measure=runtime.measure)
        if plan_fn is None:
            find_strategy(planner.strategy)
        self._plan_fn = plan_fn or self._strategy_plan
        self.watchdog: Watchdog | None = None
        if runtime.watchdog_s is not None:
            self.watchdog = Watchdog(
                world, timeout_s=runtime.watchdog_s, directory=runtime.watchdog_dir
            )
        self._stop_flag: StopFlag | None = None
        self.stop_requested = False
        self.open_step: int | None = None  # begun and not finished

    def _all_reduce(self, x: Tensor) -> Tensor:
        return self.world.wire.all_reduce(x, self.world.group)

    def dummy_loss(self, loss: Tensor) -> Tensor:
        """A dummy's loss: exactly 0, its graph through every trainable parameter.

        FSDP2 shards parameters outside forward; there the dummy's own forward must reach them. DDP
        with `find_unused_parameters` counts those that it did not reach itself, and twice is an
        error.
        """
        zero = loss * 0.0
        counted = getattr(self.model, "find_unused_parameters", False)
        if counted or "parameters" in self.backend.sharded:
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
    def settings(self) -> PlanSettings:
        """What the plans of this engine's loaders depend on, besides lengths."""
        gigabytes = self.planner.memory_gb
        budget = self.profile.budget_bytes if gigabytes is None else budget_bytes(gigabytes)
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
        dataset: Dataset,
        *,
        global_batch_size: int,
        lengths: Any = "length",
        shapes: Any = None,
        steps: int | None = None,
        epochs: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        remainder: Remainder = "drop",
        max_length: int | None = None,
        tokens: str = "input_ids",
        shift_labels: bool = True,
        batch_dim: bool = False,
        per_sample: Sequence[str] = (),
    ) -> StepLoader:
        """Steps over a data set that every rank can read; each rank reads only its own samples.

        lengths: a list, a function of the index, or a name (attribute, column or item key).
        shapes: likewise (frames, height, width) of every sample, in tokens, for video and image
        models; their product is the length. Samples are then never cut.
        steps: how many optimizer steps, default `epochs` epochs. remainder: `drop` or `short`.
        max_length: longer samples are cut to it. tokens: name of the token ids, which are also the
        labels where an item has none. shift_labels: label[t] is the token at t + 1. batch_dim: give
        tensors a leading dimension of 1, as Transformers models expect. per_sample: names of fields
        that belong to the whole sample (images): every rank of its block gets them uncut.
        """
        for name, value, least in (("steps", steps, 0), ("epochs", epochs, 0),
                                   ("max_length", max_length, 1)):  # fmt: skip
            check_at_least(name, value, least)
        found = dataset_lengths(dataset, lengths)
        empty = [i for i, n in enumerate(found) if n < 1]
        if empty:
            raise ConfigError(
                f"sample {empty[0]} has length {found[empty[0]]} ({len(empty)} samples are empty); "
                "remove them from the data set"
            )
        grids = None if shapes is None else dataset_shapes(dataset, shapes, found)
        if grids is not None and (max_length is not None or self.planner.oversize == "truncate"):
            raise ConfigError(
                "samples with shapes cannot be cut to a length: leave max_length out, and use "
                "oversize='error' or 'drop'"
            )
        sampler = GlobalSampler(
            SamplerConfig(
                size=len(found),
                batch=global_batch_size,
                seed=seed,
                shuffle=shuffle,
                remainder=remainder,
            )
        )
        preparer = StepPreparer(
            world=self.world,
            dataset=dataset,
            lengths=found,
            sampler=sampler,
            settings=self.settings,
            plan_fn=self._plan_fn,
            read=ReadOptions(
                tokens=tokens,
                shift=shift_labels,
                normalize=self.runtime.normalize,
                per_sample=tuple(per_sample),
            ),
            min_microbatches=self.backend.least_microbatches,
            closing_dummy=self.backend.closing_dummy,
            weight_dtype=self._weight_dtype(),
            max_length=max_length,
            shapes=grids,
        )
        return StepLoader(
            self,
            preparer,
            steps=sampler.config.steps_per_epoch * epochs if steps is None else steps,
            plan_ahead=self.runtime.plan_ahead,
            batch_dim=batch_dim,
        )

    def _weight_dtype(self) -> torch.dtype:
        first = next(iter(self.model.parameters()), None)
        double = first is not None and first.dtype == torch.float64
        return torch.float64 if double else torch.float32

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
        totals = torch.stack((loss_sum, torch.full_like(loss_sum, float(stop))))
        if world.size > 1:
            totals = world.wire.all_reduce(totals, world.group)
        self.stop_requested = bool(totals[1] > 0)
        if not bool(torch.isfinite(totals[0])):
            raise_non_finite(world, step)
        begin = log.clock()
        if self.runtime.max_grad_norm is not None:
            step.grad_norm = float(self.driver.clip(self.runtime.max_grad_norm))
        if self.driver.optimizer is not None:
            self.driver.step()
        if self.scheduler is not None:
            self.scheduler.step()
        log.add("optimizer", begin, log.clock())
        log.add("step", started_us, log.clock(), tokens=step.tokens)
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
        self.model.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """Plan strategy and cost profile: what the plans of a resumed run depend on."""
        from megatron_dcp.cost import digest

        return {
            "strategy": self.planner.strategy,
            "cost": {"name": self.profile.name, "digest": digest(self.profile)},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Refuse to go on with another strategy or cost profile: plans would differ."""
        mine = self.state_dict()
        wrong = [k for k in mine if state.get(k) != mine[k]]
        if wrong:
            raise ConfigError(
                "the checkpoint was written with "
                + ", ".join(f"{k} {state.get(k)!r} (now {mine[k]!r})" for k in wrong)
                + "; resume with the same, or start a new run"
            )


def node_ranks(asked: int | None, size: int) -> int:
    """As asked, else the launcher's LOCAL_WORLD_SIZE where it tiles the ranks, else one node."""
    if asked is not None:
        return asked
    local = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    return local if 1 <= local <= size and size % local == 0 else size
