"""Preparing a step off the critical path: which samples, which plan, this rank's tensors.

`StepPreparer.prepare(step)` is a function of the step number: it makes no collective and touches no
state that a running step uses, so it runs in a background thread. What goes wrong there (a sample
that cannot be read, a plan that cannot be made) is kept as `trouble` and told to all ranks when
they agree on the step, so that no rank waits for one that has stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_dcp.config import Oversize
from megatron_dcp.dispatch import (
    Dataset,
    ReadOptions,
    Sample,
    Shard,
    build_shard,
    clip_item,
    dummy_sample,
    padded_sample,
    read_sample,
)
from megatron_dcp.dist import DataWorld, PlanPost
from megatron_dcp.errors import ConfigError, MdcpError, PlanError
from megatron_dcp.plan import StepPlan, Topology, Workload, dumps, loads
from megatron_dcp.plan.check import check_runnable
from megatron_dcp.planner import PlanRequest
from megatron_dcp.planner.oversize import fit_samples
from megatron_dcp.runtime.eventlog import now_us
from megatron_dcp.runtime.sampler import GlobalSampler
from megatron_dcp.runtime.schedule import Work, rank_schedule
from megatron_dcp.runtime.stream import EndOfData, StreamSampler

PlanFn = Callable[[PlanRequest], StepPlan]


@dataclass(slots=True, kw_only=True)
class Prepared:
    """A step ready to be agreed on. trouble: why this rank cannot run it, or None."""

    step: int
    indices: list[int]
    budget_bytes: int = 0
    plan: StepPlan | None = None
    work: list[tuple[Work, Shard]] = field(default_factory=list)
    weight: float = 0.0
    trouble: str | None = None
    ended: bool = False
    error: BaseException | None = None
    dropped: int = 0
    cut: int = 0
    padding: int = 0  # tokens of the plan that are no sample's
    plan_us: tuple[int, int] = (0, 0)
    data_us: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """What every request of a run shares."""

    topology: Topology
    profile: Any
    lockstep: int
    budget_bytes: int
    recompute: bool
    oversize: Oversize


def plan_name(step: int, budget_bytes: int) -> str:
    """Under which the planes pass on a plan: a step may be planned again with another budget."""
    return f"{step}.{budget_bytes}"


class _Clipped:
    """A data set whose items are cut to given lengths."""

    def __init__(
        self, dataset: Dataset, lengths: dict[int, int], per_sample: tuple[str, ...]
    ) -> None:
        self._dataset, self._lengths, self._per_sample = dataset, lengths, per_sample

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return clip_item(self._dataset[index], self._lengths[index], self._per_sample)


def _check_repeat(found: Sample, again: Sample, index: int) -> None:
    """Raise ConfigError where an item is another one when it is read again.

    Each rank of a block reads the item itself and takes its own tokens of it.
    """
    if field := found.difference(again):
        raise ConfigError(
            f"item {index} of the data set was read twice and its {field!r} differs: ranks that "
            "share a sample would mix several draws of it. Make an item a function of its index "
            "(draw masks, crops and noise from a generator seeded by the index and the epoch)"
        )


class StepPreparer:
    """Everything that makes a step before ranks have to agree on it."""

    def __init__(
        self,
        *,
        world: DataWorld,
        dataset: Dataset,
        lengths: Sequence[int],
        sampler: GlobalSampler | StreamSampler,
        settings: PlanSettings,
        plan_fn: PlanFn,
        read: ReadOptions,
        min_microbatches: int,
        closing_dummy: bool,
        weight_dtype: torch.dtype,
        max_length: int | None = None,
        shape_quantum: int = 0,
        shapes: Sequence[tuple[int, int, int]] | None = None,
        post: PlanPost | None = None,
    ) -> None:
        self.shapes, self.post = shapes, post
        self.world, self.dataset, self.lengths, self.sampler = world, dataset, lengths, sampler
        self.settings, self.plan_fn, self.read = settings, plan_fn, read
        self.min_microbatches, self.closing_dummy = min_microbatches, closing_dummy
        self.weight_dtype = weight_dtype
        self.max_length, self.shape_quantum = max_length, shape_quantum
        self._repeats = False  # whether an item was seen to be the same when read again

    def longest(self) -> list[int]:
        """Dataset indices of the heaviest batch that could be drawn: the longest samples."""
        if isinstance(self.sampler, StreamSampler):
            raise ConfigError(
                "dry_run looks for the longest samples, and a stream does not tell them; run it on "
                "a list of samples as long as the longest that can come"
            )
        order = sorted(range(len(self.lengths)), key=lambda i: (-self.lengths[i], i))
        return order[: self.sampler.config.batch]

    def start(self, step: int) -> None:
        """The loader is about to go on from a step: a stream is read from there."""
        if isinstance(self.sampler, StreamSampler):
            self.dataset.start(self.sampler.first_needed(step))  # type: ignore[attr-defined]

    def finished(self, step: int) -> None:
        """A step is done: a stream need not hold what only it and earlier ones drew."""
        if isinstance(self.sampler, StreamSampler):
            self.dataset.forget(self.sampler.first_needed(step + 1))  # type: ignore[attr-defined]

    def prepare(self, step: int, indices: Sequence[int] | None = None) -> Prepared:
        """Plan a step and build this rank's shards; never raises for what a user can cause.

        indices: the samples, default those that the sampler draws for the step.
        """
        settings = self.settings  # the main thread may lower the budget meanwhile
        prepared = Prepared(step=step, indices=[], budget_bytes=settings.budget_bytes)
        try:
            begin = now_us()
            prepared.indices = self.sampler.indices(step) if indices is None else list(indices)
            self._plan(prepared, settings)
            planned = now_us()
            self._read(prepared)
            prepared.plan_us, prepared.data_us = (begin, planned), (planned, now_us())
        except EndOfData as error:
            prepared.ended, prepared.trouble, prepared.error = True, str(error), error
        except MdcpError as error:
            prepared.trouble, prepared.error = str(error), error
        except Exception as error:
            prepared.trouble = f"{type(error).__name__}: {error}"
            prepared.error = error
        return prepared

    def _plan(self, prepared: Prepared, s: PlanSettings) -> None:
        own = [self._length(i) for i in prepared.indices]
        lengths = Workload(lengths=tuple(own)).rounded(self.shape_quantum).lengths
        request = self._request(lengths, prepared, s)
        fitted = fit_samples(
            lengths,
            prepared.indices,
            request.cost,
            request.budget_bytes,
            s.oversize,
            recompute=s.recompute,
        )
        prepared.dropped, prepared.cut = len(fitted.dropped), len(fitted.cut)
        prepared.indices = [prepared.indices[i] for i in fitted.kept]
        if fitted.dropped or fitted.cut:
            request = self._request(fitted.lengths, prepared, s)
        plan = self._made(request)
        if plan.workload != request.workload:
            raise PlanError(
                f"step {prepared.step}: the plan is for other lengths or shapes than the batch "
                f"({len(plan.lengths)} samples of {plan.workload.tokens} tokens, the batch has "
                f"{len(request.workload.lengths)} of {request.workload.tokens})"
            )
        if plan.topology.data_ranks != self.world.size:
            raise PlanError(
                f"step {prepared.step}: the plan is for {plan.topology.data_ranks} data ranks, "
                f"there are {self.world.size}"
            )
        if plan.lockstep % s.lockstep:
            raise PlanError(
                f"step {prepared.step}: the plan is for lockstep domains of {plan.lockstep} ranks, "
                f"the backend needs domains of {s.lockstep}: running it would deadlock",
                invariant="lockstep_slots_match",
            )
        prepared.plan = check_runnable(plan, s.profile.head_limits)
        pairs = zip(prepared.indices, plan.lengths, strict=True)
        prepared.padding = sum(max(0, n - self._length(i)) for i, n in pairs)

    def _length(self, index: int) -> int:
        """Tokens of a sample, cut to max_length."""
        n: int = self.lengths[index]
        return n if self.max_length is None else min(n, self.max_length)

    def _request(self, lengths: Sequence[int], prepared: Prepared, s: PlanSettings) -> PlanRequest:
        shapes = self.shapes
        return PlanRequest(
            workload=Workload(
                lengths=tuple(lengths),
                shapes=None if shapes is None else tuple(shapes[i] for i in prepared.indices),
            ),
            topology=s.topology,
            profile=s.profile,
            lockstep=s.lockstep,
            budget_bytes=s.budget_bytes,
            recompute=s.recompute,
            step=prepared.step,
        )

    def _made(self, request: PlanRequest) -> StepPlan:
        """The plan of a request: made here, or in the first plane where there are several."""
        if self.post is None:
            return self.plan_fn(request)
        name = plan_name(request.step, request.budget_bytes)
        if not self.post.sends:
            return loads(self.post.take(name))
        try:
            plan = self.plan_fn(request)
        except Exception as error:
            self.post.send_trouble(name, f"{type(error).__name__}: {error}")
            raise
        self.post.send(name, dumps(plan).encode())
        return plan

    def _read(self, prepared: Prepared) -> None:
        plan = prepared.plan
        assert plan is not None
        dataset: Dataset = self.dataset
        if prepared.cut or self.max_length is not None:
            wanted = dict(zip(prepared.indices, plan.lengths, strict=True))
            dataset = _Clipped(dataset, wanted, self.read.per_sample)

        def sample(i: int, *, shared: bool) -> Sample:
            index, length = prepared.indices[i], plan.lengths[i]
            length_read = min(length, self._length(index))
            found = read_sample(dataset, index, length_read, self.read)
            if shared and not self._repeats:
                again = read_sample(dataset, index, length_read, self.read)
                _check_repeat(found, again, index)
                self._repeats = True
            return padded_sample(found, length)

        rank, weight = self.world.rank, 0.0
        schedule = rank_schedule(
            plan,
            rank,
            min_microbatches=self.min_microbatches,
            closing_dummy=self.closing_dummy,
        )
        for work in schedule:
            if work.dummy:
                samples, keys = [dummy_sample(sample(0, shared=False))], [-1]
            else:
                shared = work.placement.degree > 1
                samples = [sample(i, shared=shared) for i in work.placement.samples]
                keys = [prepared.indices[i] for i in work.placement.samples]
            shapes = None
            if plan.workload.shapes is not None:
                of_step = plan.workload.shapes
                shapes = [of_step[i] for i in work.placement.samples] or [(1, 1, 1)]
            shard = build_shard(
                self.world,
                work.placement,
                samples,
                sample_keys=keys,
                weight_dtype=self.weight_dtype,
                shapes=shapes,
                step=prepared.step,
                dummy=work.dummy,
            )
            weight += shard.weight
            prepared.work.append((work, shard))
        prepared.weight = weight
