"""Running Megatron's own schedule under a plan that is made anew every step.

`MegatronDcp.wrap` takes the function that Megatron's `get_forward_backward_func` returns and gives
one with the same arguments. A call reads the step's samples, plans, compares digests, moves the
samples to their ranks and calls the original with an iterator, a forward step and a microbatch
count of its own. Gradients are summed per token and divided once by the step's token count, which
is Megatron's per-token loss; the reduction, the optimizer and the learning rate see no difference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dcp.adapters.megatron.attention import check_followed
from megatron_dcp.adapters.megatron.checks import check_model, check_wrapping
from megatron_dcp.adapters.megatron.collect import FieldSpec, Reader, StepData, collect
from megatron_dcp.adapters.megatron.domain import Domain, build_domain
from megatron_dcp.adapters.megatron.experts import follow_experts, uses_global_loss
from megatron_dcp.adapters.megatron.frequencies import ExpertFrequencies
from megatron_dcp.adapters.megatron.microbatch import (
    Microbatch,
    Peek,
    build_microbatches,
    gpt_forward_step,
    loss_of,
    per_token,
    summed_reports,
)
from megatron_dcp.adapters.megatron.pricing import model_profile
from megatron_dcp.adapters.megatron.recompute import Recompute
from megatron_dcp.adapters.megatron.samples import Splitter
from megatron_dcp.adapters.megatron.slots import rank_slots
from megatron_dcp.config import MegatronConfig, PlannerConfig
from megatron_dcp.cost import CostModel, CostProfile
from megatron_dcp.dispatch.exchange import exchange
from megatron_dcp.dist import agree
from megatron_dcp.errors import AdapterError, OutOfMemoryError
from megatron_dcp.plan import Placement, StepPlan, Workload, digest, dumps, lockstep_ranks
from megatron_dcp.plan.shards import shard_map
from megatron_dcp.planner import PlanRequest, make_plan
from megatron_dcp.planner.oversize import most_bytes_needed
from megatron_dcp.runtime.oom import (
    agreed_limit,
    is_out_of_memory,
    make_report,
    smaller_budget,
    write_budget,
)


@dataclass(slots=True, kw_only=True)
class MegatronDcp:
    """DCP for a Megatron training loop; see docs/integrations/megatron.md for the ten lines.

    reader: item of the data iterator -> samples (default: `Splitter()`, one sample per row).
    forward_step: (iterator of Microbatch, model) -> (output, loss function); default GPT's.
    step_of: current optimizer step, for the plan's `step`; default counts the calls that train.
    Give it where a step may run again. after_step: gets `state_dict()` after each call that trains.
    """

    planner: PlannerConfig = field(default_factory=PlannerConfig)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    reader: Reader = field(default_factory=lambda: Splitter().samples)
    forward_step: Callable[[Iterator[Microbatch], Any], Any] | None = None
    step_of: Callable[[], int] | None = None
    after_step: Callable[[dict[str, Any]], None] | None = None
    last_plan: StepPlan | None = None
    digests: list[str] = field(default_factory=list)
    _domain: Domain | None = None
    _profile: CostProfile | None = None
    _recompute: list[Recompute] = field(default_factory=list)
    _steps: int = 0
    _placement: Placement | None = None  # of the forward that began last
    _frequencies: ExpertFrequencies = field(default_factory=ExpertFrequencies)

    def wrap(self, forward_backward: Callable[..., Any]) -> Callable[..., Any]:
        """Megatron's schedule function under the plan; same keyword arguments, same result."""
        if getattr(forward_backward, "mdcp_planned", False):
            return forward_backward  # a patched tree under `mdcp launch`

        @functools.wraps(forward_backward)
        def planned(
            *,
            forward_step_func: Callable[..., Any],
            data_iterator: Any,
            model: Any,
            num_microbatches: int,
            forward_only: bool = False,
            collect_non_loss_data: bool = False,
            **kwargs: Any,
        ) -> Any:
            if collect_non_loss_data:  # not a training step: outputs of unplanned microbatches
                return forward_backward(
                    forward_step_func=forward_step_func,
                    data_iterator=data_iterator,
                    model=model,
                    num_microbatches=num_microbatches,
                    forward_only=forward_only,
                    collect_non_loss_data=True,
                    **kwargs,
                )
            chunks = list(model) if isinstance(model, list) else [model]
            self._prepare(chunks)
            gather_parameters(chunks)
            microbatches = self._plan_step(data_iterator, num_microbatches, forward_only)
            if not forward_only:
                assert self.last_plan is not None
                self._frequencies.begin(self.last_plan, num_microbatches)
            step = self._forward_step(forward_step_func, chunks)
            many = len(chunks) > 1
            try:
                out = forward_backward(
                    forward_step_func=step,
                    data_iterator=[iter(microbatches) for _ in chunks]
                    if many
                    else iter(microbatches),
                    model=model,
                    num_microbatches=len(microbatches),
                    forward_only=forward_only,
                    **kwargs,
                )
            except (MemoryError, RuntimeError) as error:
                if is_out_of_memory(error):
                    self._end_out_of_memory(error)
                raise
            finally:
                for settings in self._recompute:
                    settings.restore()
            if forward_only:
                assert self._domain is not None
                return summed_reports(self._domain, out)
            self._frequencies.end()
            if self.after_step is not None:
                self.after_step(self.state_dict())
            return out

        planned.mdcp_planned = True  # type: ignore[attr-defined]
        return planned

    def _prepare(self, chunks: Sequence[Any]) -> None:
        """Once: groups, cost profile, and the model settings that a plan needs."""
        if self._domain is not None:
            return
        if self.planner.oversize != "error":
            raise AdapterError(
                f"--mdcp-oversize {self.planner.oversize} was asked; under Megatron a sample that "
                "fits no rank is always an error. Cut or leave out such samples in the data set"
            )
        from megatron.core.utils import get_model_config

        configs = [get_model_config(chunk) for chunk in chunks]
        check_model(configs[0], self.megatron)
        for chunk in chunks:
            check_wrapping(chunk)
            check_followed(chunk)
            follow_experts(chunk, self._frequencies)
        domain = build_domain()
        if uses_global_loss(configs[0]):
            self._frequencies.prepare(configs[0], domain.world.device)
        vocab = _vocab(chunks[0])
        self._profile = model_profile(
            configs[0], vocab, domain.topology, self.planner, self.megatron
        )
        limit = agreed_limit(domain.world)
        if limit is not None and limit < self._profile.budget_bytes:
            self._profile = self._profile.with_budget(limit)
        if domain.pp_size > 1:
            for config in configs:
                config.variable_seq_lengths = True  # stages exchange shapes first
        self._recompute = [
            Recompute.of(chunk, config) for chunk, config in zip(chunks, configs, strict=True)
        ]
        self._domain = domain

    def _end_out_of_memory(self, error: BaseException) -> None:
        """Leave a smaller budget for the launcher's next start, and say what was expected."""
        assert self._domain is not None
        assert self._profile is not None
        assert self.last_plan is not None
        plan = self.last_plan
        everything = range(len(plan.lengths))
        report = make_report(self._domain.world, plan, self._placement, everything, error)
        cost = CostModel(self._profile, self._domain.topology, plan.lockstep)
        leanest = most_bytes_needed(
            cost, max(plan.lengths), recompute=self.planner.recompute == "auto"
        )
        static = self._profile.static_bytes
        budget = smaller_budget([report], plan.budget_bytes, static, leanest)
        text = (
            f"{report.text()}. Start from the last checkpoint with --mdcp-memory-gb "
            f"{(budget or plan.budget_bytes) / 1e9:.6g} or less; "
            "`python -m megatron_dcp.cli.elastic` does that by itself"
        )
        if budget is not None:
            write_budget(budget, text)
        raise OutOfMemoryError(text) from error

    def _plan_step(self, data_iterator: Any, count: int, forward_only: bool) -> list[Microbatch]:
        """Read, plan, agree, move; returns this rank's microbatches."""
        domain = self._domain
        assert domain is not None
        data = collect(domain, data_iterator, count, self.reader)
        plan = self._make_plan(domain, data)
        agree(domain.world, plan, data.weight, data.trouble)
        domain.world.ensure_groups(ulysses_blocks(plan))
        if not forward_only:
            self._steps += 1
            self.digests.append(digest(plan))
            self._write(plan)
        self.last_plan = plan
        local = self._move(domain, plan, data)
        sequence_parallel = self._recompute[0].config.sequence_parallel
        return build_microbatches(
            domain,
            plan,
            rank_slots(plan, domain.world.rank),
            local,
            data.fields,
            multiple=domain.tp_size if sequence_parallel else 1,
            step=plan.step,
        )

    def _make_plan(self, domain: Domain, data: StepData) -> StepPlan:
        assert self._profile is not None
        lockstep = domain.lockstep
        if self.planner.lockstep != "auto":
            asked = lockstep_ranks(self.planner.lockstep, domain.topology)
            if asked % lockstep:
                raise AdapterError(
                    f"--mdcp-lockstep {self.planner.lockstep} is {asked} ranks, this run needs a "
                    f"multiple of {lockstep} (its expert groups); use auto"
                )
            lockstep = asked
        request = PlanRequest(
            workload=Workload(lengths=data.lengths),
            topology=domain.topology,
            profile=self._profile,
            lockstep=lockstep,
            recompute=self.planner.recompute == "auto",
            step=self.step_of() if self.step_of is not None else self._steps,
        )
        return make_plan(request, self.planner.strategy)

    def _move(
        self, domain: Domain, plan: StepPlan, data: StepData
    ) -> dict[int, dict[str, Tensor]] | None:
        """The fields of this rank's placements, by index: from their owners, then over TP."""
        world = domain.world
        if domain.pp_rank not in (0, domain.pp_size - 1):
            return None
        numbers = [i for i, p in enumerate(plan.placements) if world.rank in p.ranks]
        shards: list[dict[str, Tensor]]
        if domain.tp_rank > 0:
            shards = [_empty_shard(domain, plan, i, data.fields) for i in numbers]
        elif data.mine is None:
            raise AdapterError(
                f"stage {domain.pp_rank} of {domain.pp_size} has no data iterator; the first and "
                "the last stage read the data set"
            )
        else:
            shards = [fields for _, fields in exchange(world, plan, data.owners, data.mine)]
        if domain.tp_size > 1:
            _share(domain, shards, data.fields)
        return dict(zip(numbers, shards, strict=True))

    def _forward_step(
        self, script: Callable[..., Any] | None, chunks: Sequence[Any]
    ) -> Callable[..., Any]:
        """The forward step given to the schedule: recomputation first, then the model.

        script: the forward step of the unplanned run, whose loss function is kept.
        """
        inner = self.forward_step or functools.partial(gpt_forward_step, loss_of(script))
        settings = {id(chunk): s for chunk, s in zip(chunks, self._recompute, strict=True)}
        stage_layers = [_layers(chunk) for chunk in chunks]
        layers = dict(zip(settings, stage_layers, strict=True))
        total = max(1, sum(stage_layers))

        def step(iterator: Peek, model: Any, *args: Any) -> Any:
            mb = iterator.peek()
            self._placement = mb.context.placement
            own = layers[id(model)]
            share = -(-mb.recompute * own // total)  # of a chunk, rounded up
            settings[id(model)].apply(share, mb.recompute_kind, own)
            output, loss = inner(iterator, model)
            return output, per_token(loss)

        def peeking(iterator: Iterator[Microbatch], model: Any, *args: Any) -> Any:
            return step(Peek(iterator), model, *args)

        return peeking

    def _write(self, plan: StepPlan) -> None:
        """The plan as JSON, from one process."""
        if self.megatron.plan_dir is None or dist.get_rank() != 0:
            return
        folder = Path(self.megatron.plan_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"step{plan.step:06d}.json").write_text(dumps(plan))

    @property
    def communicators(self) -> int:
        """Process groups that this package made on this rank."""
        return 0 if self._domain is None else self._domain.world.communicators

    def state_dict(self) -> dict[str, Any]:
        """What a loop of its own must put into its checkpoint for the same steps after a resume.

        Numbers and lists, the same on every process.
        """
        return {"steps": self._steps, "expert_counts": self._frequencies.last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint, before the first step."""
        self._steps = int(state["steps"])
        self._frequencies.last = state.get("expert_counts")


def _empty_shard(
    domain: Domain, plan: StepPlan, index: int, specs: Sequence[FieldSpec]
) -> dict[str, Tensor]:
    """Room for this rank's tokens of a placement."""
    p, world = plan.placements[index], domain.world
    shards = shard_map([plan.lengths[i] for i in p.samples], p.degree, p.inner_degree)
    n = shards.tokens[world.rank - p.first_rank]
    return {
        name: torch.empty(n, *shape, dtype=dtype, device=world.device)
        for name, dtype, shape in specs
    }


def _share(domain: Domain, shards: Sequence[dict[str, Tensor]], specs: Sequence[FieldSpec]) -> None:
    """Tensor rank 0's tokens to the other tensor ranks, one broadcast per field; in place."""
    if not shards:
        return
    source = dist.get_global_rank(domain.tp_group, 0)
    for name, *_ in specs:
        parts = [s[name] for s in shards]
        whole = torch.cat(parts)
        dist.broadcast(whole, source, group=domain.tp_group)
        for shard, part in zip(shards, torch.split(whole, [len(x) for x in parts]), strict=True):
            shard[name] = part


def gather_parameters(chunks: Sequence[Any]) -> None:
    """Start every overlapped parameter gather at the step's start, in one order on all ranks.

    Megatron starts a bucket's gather when the forward reaches the bucket before it. Ranks reach it
    in different microbatches here: one would wait in an attention for a rank that waits for its
    parameters. `align_param_gather` is Megatron's own switch for gathers started by others.
    """
    for chunk in chunks:
        settings = getattr(chunk, "ddp_config", None)
        if settings is None or not settings.overlap_param_gather:
            continue
        if not getattr(chunk, "remove_forward_pre_hook_handles", None):
            continue  # the first step: parameters are complete and hooks are off
        settings.align_param_gather = True
        chunk.config.param_sync_func = None
        for group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:
            if not group.param_gather_dispatched:
                group.start_param_sync()


def ulysses_blocks(plan: StepPlan) -> list[tuple[int, int]]:
    """Blocks that need an all-to-all group, in plan order."""
    return [
        (first, p.inner_degree)
        for p in plan.placements
        if p.inner_degree > 1
        for first in range(p.first_rank, p.first_rank + p.degree, p.inner_degree)
    ]


def _layers(chunk: Any) -> int:
    """Transformer layers of a model chunk."""
    from megatron.core.utils import get_attr_wrapped_model

    return len(get_attr_wrapped_model(chunk, "decoder").layers)


def _vocab(chunk: Any) -> int:
    from megatron.core.utils import get_attr_wrapped_model

    return int(get_attr_wrapped_model(chunk, "vocab_size"))
