"""A strategy for contract tests: valid plans that mix degrees, schemes, packs and recomputation.

Production plans depend on a cost profile and would make small tests run everything on degree 1.
This one draws, from the step number alone, what the runtime must survive: holes, blocks of
every width, several schemes in one step, packs, recompute values that differ between placements.
"""

from __future__ import annotations

import random

from megatron_dcp.cost import pack_of
from megatron_dcp.plan import Placement
from megatron_dcp.planner.registry import Draft, PlanRequest, register, strategy_names

NAME, FIRST = "test-mix", "test-first"


def mix(request: PlanRequest, parameter: str | None) -> Draft:
    """parameter: `even` draws one recompute value per slot; None one per placement."""
    rng = random.Random(1000 + request.step)
    topology, cost = request.topology, request.cost
    waiting = list(range(len(request.workload.lengths)))
    rng.shuffle(waiting)
    free = [0] * topology.data_ranks
    per_slot: dict[int, int] = {}
    placements = []
    whole = request.lockstep == topology.data_ranks and request.lockstep > 1
    while waiting:
        degree = rng.choice([d for d in (1, 1, 2, 3, 4) if topology.legal_degree(d)])
        starts = [f for f in range(topology.data_ranks) if topology.block_fits(f, degree)]
        first = min(starts, key=lambda f: (max(free[f : f + degree]), rng.random()))
        slot = max(free[first : first + degree])
        samples = [waiting.pop() for _ in range(min(len(waiting), rng.choice([1, 1, 2])))]
        mode = rng.choice(cost.modes(degree))
        recompute = rng.randint(0, cost.layers) if request.recompute else 0
        if whole:
            recompute = per_slot.setdefault(slot, recompute)
        pack = pack_of(request.profile, request.workload, samples)
        placements.append(
            Placement(
                slot=slot,
                first_rank=first,
                degree=degree,
                samples=tuple(samples),
                scheme=mode.scheme,
                inner_degree=mode.inner_degree,
                recompute=recompute,
                time_us=cost.time_us(pack, degree, mode, recompute),
                bytes=cost.bytes(pack, degree, mode, recompute),
            )
        )
        free[first : first + degree] = [slot + 1] * degree
    return Draft(placements=placements, algorithm="random")


def register_mix() -> str:
    """Register once per process; returns the strategy's name."""
    if NAME not in strategy_names():
        register(NAME, parameter="nothing")(mix)
    return NAME


def first(request: PlanRequest, parameter: str | None) -> Draft:
    """Every sample alone on data rank 0: the others have nothing but dummies."""
    cost = request.cost
    mode = cost.modes(1)[0]
    placements = []
    for slot in range(len(request.workload.lengths)):
        pack = pack_of(request.profile, request.workload, [slot])
        placements.append(
            Placement(
                slot=slot,
                first_rank=0,
                degree=1,
                samples=(slot,),
                scheme=mode.scheme,
                inner_degree=mode.inner_degree,
                recompute=0,
                time_us=cost.time_us(pack, 1, mode, 0),
                bytes=cost.bytes(pack, 1, mode, 0),
            )
        )
    return Draft(placements=placements, algorithm="first")


def register_first() -> str:
    """Register once per process; returns the strategy's name."""
    if FIRST not in strategy_names():
        register(FIRST, parameter="nothing")(first)
    return FIRST
