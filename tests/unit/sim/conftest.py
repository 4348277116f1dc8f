"""Plans for the simulator's tests, made without any strategy."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from megatron_dcp.cost import CostModel, CostProfile, Link, Mode, ModelShape, pack_of
from megatron_dcp.cost.profile import Overhead, Overlap
from megatron_dcp.plan import Placement, StepPlan, Workload, check_plan, makespan_us


def simple_profile(**changes):
    """1 us per token, 0.001 us per pair (full), links 0.001 and 0.01 us/byte, 8 heads."""
    base = {
        "name": "simple",
        "model": ModelShape(
            layers=4, heads=8, kv_heads=8, head_dim=16, hidden=128, vocab=64, element_bytes=2
        ),
        "pairs": "full",
        "linear_us_per_token": 1.0,
        "attn_us_per_pair": 0.001,
        "overhead_us": Overhead(async_=10.0, lockstep=50.0),
        "links": (
            Link(max_degree=4, us_per_byte=0.001, latency_us=2.0),
            Link(max_degree=64, us_per_byte=0.01, latency_us=5.0),
        ),
        "budget_bytes": 10**12,
    }
    return CostProfile(**{**base, **changes})


def build(profile, topology, lengths, rows, *, lockstep=1, shapes=None):
    """A checked plan. rows: (slot, first_rank, degree, scheme, inner, recompute, samples)."""
    cost = CostModel(profile, topology, lockstep)
    workload = Workload(lengths=tuple(lengths), shapes=shapes)
    placements = []
    for slot, first, degree, scheme, inner, recompute, samples in rows:
        pack = pack_of(profile, workload, samples)
        mode = Mode(scheme, inner)
        placements.append(
            Placement(
                slot=slot, first_rank=first, degree=degree, scheme=scheme, inner_degree=inner,
                recompute=recompute, samples=tuple(samples),
                time_us=cost.time_us(
                    pack, degree, mode, recompute, topology.block_speed(first, degree)
                ),
                bytes=cost.bytes(pack, degree, mode, recompute),
            )
        )  # fmt: skip
    plan = StepPlan(
        strategy="test", algorithm="by hand", topology=topology, lockstep=lockstep,
        cost=profile.ref, budget_bytes=profile.budget_bytes, layers=cost.layers, workload=workload,
        placements=tuple(placements), makespan_us=0, lower_bound_us=0,
    )  # fmt: skip
    return check_plan(replace(plan, makespan_us=makespan_us(plan)), profile.head_limits)


def random_plan(profile, topology, seed, *, lockstep=1, slots=4, full=False, grid=False):
    """Random blocks in each slot (full: no holes), random schemes, recompute and samples."""
    rng = random.Random(seed)
    cost = CostModel(profile, topology, lockstep)
    lengths, shapes, rows = [], [], []
    for slot in range(slots):
        rank, recompute = 0, rng.randint(0, cost.layers)
        while rank < topology.data_ranks:
            degree = rng.choice([d for d in topology.degrees() if topology.block_fits(rank, d)])
            if full or rank == 0 or rng.random() < 0.8:
                mode = rng.choice(cost.modes(degree))
                if topology.data_ranks != lockstep:
                    recompute = rng.randint(0, cost.layers)
                ids = []
                for _ in range(rng.randint(1, 4)):
                    shape = (rng.randint(1, 9), rng.randint(1, 20), rng.randint(1, 20))
                    ids.append(len(lengths))
                    shapes.append(shape)
                    lengths.append(shape[0] * shape[1] * shape[2])
                rows.append((slot, rank, degree, mode.scheme, mode.inner_degree, recompute, ids))
            rank += degree
    return build(
        profile, topology, lengths, rows, lockstep=lockstep, shapes=tuple(shapes) if grid else None
    )


@pytest.fixture
def plans():
    """The helpers above as one object."""

    class Helpers:
        profile = staticmethod(simple_profile)
        build = staticmethod(build)
        random = staticmethod(random_plan)
        Overlap = Overlap

    return Helpers
