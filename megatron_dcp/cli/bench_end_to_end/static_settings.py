"""A trainer's own static settings as plans, so that they run on the same stack as `dcp`.

    cp:D             static context parallelism: one sample per microbatch over D ranks, dealt to
                     the blocks in order, as Megatron and Ulysses run a batch without packing
    trl-packing:D    TRL's `pack_dataset` (best fit decreasing) to the longest sample of the data,
                     packs dealt in order, D ranks share a pack (1: none)
    NAME@all         any strategy with equal numbers of microbatches on all ranks, as trainers need
                     that synchronise every microbatch; `kk@all` is what verl does

They are registered when this module is imported, which the benchmark does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron_dcp.dist import DataWorld
from megatron_dcp.errors import AdapterError, ConfigError
from megatron_dcp.plan import StepPlan
from megatron_dcp.planner import PlanRequest, make_plan, register
from megatron_dcp.planner.packing import blocks_of, fixed_degree, stack_blocks
from megatron_dcp.planner.pricing import Pricer, place_slots
from megatron_dcp.planner.registry import Draft, find_strategy
from megatron_dcp.runtime.contender import plan_on_rank_0, timed_by_clock

EVERYBODY = "@all"


def check_strategy(strategy: str) -> None:
    """Raises ConfigError for a strategy that is not known."""
    if "@" in strategy and not strategy.endswith(EVERYBODY):
        raise ConfigError(f"strategy {strategy!r}: only {EVERYBODY!r} may follow a name")
    find_strategy(strategy.removesuffix(EVERYBODY))


def plan_fn_of(world: DataWorld, strategy: str) -> Callable[[PlanRequest], StepPlan]:
    """Makes the plans of a strategy, `NAME@all` included. With a time limit it is collective."""
    name = strategy.removesuffix(EVERYBODY)

    def plan(request: PlanRequest) -> StepPlan:
        if name != strategy:
            request = replace(request, lockstep=request.topology.data_ranks)
        if timed_by_clock(name):
            return plan_on_rank_0(world, name, request)
        return make_plan(request, name)

    return plan


def _dealt(pricer: Pricer, name: str, degree: int, packs: Sequence[Sequence[int]]) -> Draft:
    """Packs to the blocks in their order, one after the other."""
    blocks = blocks_of(pricer.topology, degree)
    held = [(b, [list(p) for p in packs[i :: len(blocks)]]) for i, b in enumerate(blocks)]
    return Draft(placements=place_slots(pricer, stack_blocks(pricer, degree, held)), algorithm=name)


@register("cp", parameter="a degree")
def cp(request: PlanRequest, parameter: str | None) -> Draft:
    """`cp:D`. Raises PlanError when the longest sample does not fit the degree."""
    pricer = Pricer(request)
    degree = fixed_degree(pricer, "cp", _given("cp", parameter))
    packs = [[i] for i in range(len(request.workload.lengths))]
    return _dealt(pricer, f"one sample per microbatch, degree {degree}", degree, packs)


@register("trl-packing", parameter="a degree")
def trl_packing(request: PlanRequest, parameter: str | None) -> Draft:
    """`trl-packing:D`. Raises PlanError when a full pack does not fit the degree."""
    pricer = Pricer(request)
    degree = fixed_degree(pricer, "trl-packing", _given("trl-packing", parameter))
    packs = bfd_packs(request.workload.lengths)
    return _dealt(pricer, f"TRL bfd packs, degree {degree}", degree, packs)


def _given(name: str, parameter: str | None) -> str:
    if parameter is None:
        raise ConfigError(f"strategy {name!r} needs a degree: {name}:2")
    return parameter


def bfd_packs(lengths: Sequence[int]) -> list[list[int]]:
    """Samples of each pack as TRL's own `pack_dataset` puts them together."""
    try:
        from datasets import Dataset, disable_progress_bars
        from trl import pack_dataset
    except ImportError as error:
        raise AdapterError(f"trl-packing needs the packages trl and datasets: {error}") from error
    disable_progress_bars()
    rows = Dataset.from_dict({"input_ids": [[i] * n for i, n in enumerate(lengths)]})
    packed = pack_dataset(rows, max(lengths), strategy="bfd")
    return [list(dict.fromkeys(ids)) for ids in packed["input_ids"]]
