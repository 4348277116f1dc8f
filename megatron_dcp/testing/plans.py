"""Random valid plans: any degree mix, scheme and order; for tests that hold under every plan."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from megatron_dcp.cost import CostModel, CostProfile, Mode, ModelShape, pack_of
from megatron_dcp.cost.profile import Link
from megatron_dcp.plan import Placement, StepPlan, Topology, Workload, check_plan, makespan_us
from megatron_dcp.planner import PlanRequest


def tiny_profile(
    *, layers: int = 2, heads: int = 4, kv_heads: int = 2, head_dim: int = 8, vocab: int = 64
) -> CostProfile:
    """A cost profile of a tiny model; its numbers are of no machine."""
    return CostProfile(
        name="tiny",
        model=ModelShape(
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            hidden=heads * head_dim,
            vocab=vocab,
            element_bytes=8,
        ),
        linear_us_per_token=10.0,
        attn_us_per_pair=0.1,
        links=(Link(max_degree=64, us_per_byte=0.001, latency_us=5.0),),
        kept_bytes_per_token_layer=1000,
        checkpoint_bytes_per_token_layer=100,
        budget_bytes=10**12,
    )


def random_plan(
    request: PlanRequest,
    seed: int,
    *,
    schemes: Sequence[str] = ("local", "ulysses", "ring", "allgather", "hybrid"),
    idle_rank: bool = False,
    recompute: bool = True,
) -> StepPlan:
    """A plan drawn at random; it passes every invariant.

    idle_rank: leave the last rank without a placement (where there are at least two).
    """
    rng = random.Random(seed)
    topology, cost = request.topology, request.cost
    usable = topology.data_ranks - (1 if idle_rank and topology.data_ranks > 1 else 0)
    order = list(range(len(request.workload.lengths)))
    rng.shuffle(order)
    placements: list[Placement] = []
    slot_of = [0] * topology.data_ranks  # next free slot of each rank
    while order:
        samples = [order.pop() for _ in range(min(len(order), rng.randint(1, 4)))]
        degree, first = _random_block(rng, topology, usable)
        modes = [m for m in cost.modes(degree) if m.scheme in schemes]
        if not modes:
            degree, first, modes = 1, rng.randrange(usable), [Mode("local", 1)]
        mode = rng.choice(modes)
        slot = max(slot_of[first : first + degree]) + (rng.random() < 0.2 and request.lockstep == 1)
        for r in range(first, first + degree):
            slot_of[r] = slot + 1
        placements.append(
            Placement(
                slot=slot,
                first_rank=first,
                degree=degree,
                samples=tuple(samples),
                scheme=mode.scheme,
                inner_degree=mode.inner_degree,
                recompute=rng.randint(0, cost.layers) if recompute else 0,
            )
        )
    return finish_plan(request, placements)


def _random_block(rng: random.Random, topology: Topology, usable: int) -> tuple[int, int]:
    blocks = [
        (d, f)
        for d in topology.degrees()
        for f in range(usable - d + 1)
        if topology.block_fits(f, d)
    ]
    degrees = sorted({d for d, _ in blocks})
    degree = rng.choice(degrees)
    return degree, rng.choice([f for d, f in blocks if d == degree])


def finish_plan(request: PlanRequest, placements: Sequence[Placement]) -> StepPlan:
    """Price given placements and complete them to a checked plan."""
    cost = request.cost
    if request.lockstep == request.topology.data_ranks > 1:
        of_slot: dict[int, int] = {}
        for p in placements:
            of_slot.setdefault(p.slot, p.recompute)
        placements = [replace(p, recompute=of_slot[p.slot]) for p in placements]
    priced = [_priced(request, cost, p) for p in placements]
    plan = StepPlan(
        strategy="random",
        algorithm="random",
        topology=request.topology,
        lockstep=request.lockstep,
        cost=request.profile.ref,
        budget_bytes=request.budget_bytes,
        layers=cost.layers,
        workload=request.workload,
        placements=tuple(priced),
        makespan_us=0,
        lower_bound_us=0,
        step=request.step,
    )
    return check_plan(replace(plan, makespan_us=makespan_us(plan)), request.profile.head_limits)


def _priced(request: PlanRequest, cost: CostModel, p: Placement) -> Placement:
    pack = pack_of(request.profile, request.workload, p.samples)
    mode = Mode(p.scheme, p.inner_degree)
    return replace(
        p,
        time_us=cost.time_us(pack, p.degree, mode, p.recompute),
        bytes=cost.bytes(pack, p.degree, mode, p.recompute),
    )


def plan_request(
    lengths: Sequence[int],
    ranks: int,
    *,
    ranks_per_node: int | None = None,
    lockstep: int = 1,
    profile: CostProfile | None = None,
    step: int = 0,
) -> PlanRequest:
    """A request for tests."""
    return PlanRequest(
        workload=Workload(lengths=tuple(lengths)),
        topology=Topology(data_ranks=ranks, ranks_per_node=ranks_per_node or ranks),
        profile=profile or tiny_profile(),
        lockstep=lockstep,
        step=step,
    )
