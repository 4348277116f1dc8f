"""Every baseline on random small workloads: its plans pass every invariant, in every mode.

`build_plan` runs `check_plan`, so a plan that breaks an invariant raises. A strategy may only
refuse a batch whose longest sample fits no degree that it may use.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_dcp.cost import CostProfile, Link, ModelShape, resolve
from megatron_dcp.errors import PlanError
from megatron_dcp.plan import Topology, Workload, canonical_bytes
from megatron_dcp.planner import PlanRequest, strategy_names
from megatron_dcp.planner.baselines import BASELINES
from megatron_dcp.planner.packing import degree_ladder
from megatron_dcp.planner.pricing import Pricer
from megatron_dcp.planner.registry import build_plan, find_strategy

# Head limits, KV gathers, overlap, latency, efficiency, static bytes: all that a100-gpt7b lacks.
GROUPED = replace(
    resolve("a100-gpt7b"),
    name="grouped",
    pairs="causal",
    model=ModelShape(
        layers=8, heads=12, kv_heads=4, head_dim=64, hidden=768, vocab=1000, element_bytes=2
    ),
    linear_half_tokens=300,
    attn_half_tokens=200,
    comm_bytes_per_token_layer=None,
    links=(Link(max_degree=4, us_per_byte=1e-4, latency_us=3.0),
           Link(max_degree=64, us_per_byte=1e-3, latency_us=20.0)),
    static_bytes=200_000_000,
    kept_bytes_per_token_layer=60_000,
    checkpoint_bytes_per_token_layer=3_000,
    working_bytes_per_token=2_000,
    budget_bytes=3_200_000_000,
)  # fmt: skip
TOPOLOGIES = ((1, 1), (2, 2), (4, 2), (8, 8), (16, 8), (12, 6), (24, 8), (5, 5), (9, 3), (32, 4))
# name -> a parameter that it takes (flexsp: seconds); everything else runs bare.
PARAMETERS = {"flexsp": "flexsp:1"}
CHEAP = [PARAMETERS.get(name, name) for name in BASELINES if name != "flexsp"]


@st.composite
def requests(draw: st.DrawFn) -> PlanRequest:
    ranks, per_node = draw(st.sampled_from(TOPOLOGIES))
    length = st.one_of(st.integers(1, 400), st.integers(1, 9000), st.integers(6000, 90_000))
    lengths = draw(st.lists(length, min_size=1, max_size=24))
    lengths += [lengths[0]] * draw(st.integers(0, 6))
    speed = None
    if draw(st.integers(0, 3)) == 0:
        speed = tuple(draw(st.integers(900, 1000)) for _ in range(ranks))
    stages = draw(st.sampled_from((1, 1, 1, 2)))
    return PlanRequest(
        workload=Workload(lengths=tuple(lengths)),
        topology=Topology(
            data_ranks=ranks, ranks_per_node=per_node, pipeline_stages=stages, speed=speed
        ),
        profile=draw(st.sampled_from((resolve("a100-gpt7b"), GROUPED))),
        lockstep=draw(st.sampled_from((1, per_node, ranks))),
        recompute=draw(st.integers(0, 4)) > 0,
    )


def fits_somewhere(asked: PlanRequest) -> bool:
    pricer = Pricer(asked)
    ladder = degree_ladder(asked.topology)
    longest = pricer.longest()
    return any(pricer.sample_price(longest, d) is not None for d in ladder)


@pytest.mark.parametrize("spec", CHEAP)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(asked=requests())
def test_plans_pass_every_invariant(spec: str, asked: PlanRequest) -> None:
    function, parameter = find_strategy(spec)
    if not fits_somewhere(asked):
        with pytest.raises(PlanError, match="fits_memory"):
            build_plan(asked, spec, function, lambda _: 1, parameter)
        return
    plan = build_plan(asked, spec, function, lambda _: 1, parameter)
    again = build_plan(asked, spec, function, lambda _: 1, parameter)
    assert canonical_bytes(plan) == canonical_bytes(again)
    if not asked.recompute:
        assert all(p.recompute == 0 for p in plan.placements)


def test_names_are_registered_without_loading_their_modules() -> None:
    """In a fresh interpreter: the strategies' modules and highspy stay out until they run."""
    import subprocess
    import sys

    code = (
        "import sys, megatron_dcp.planner as p; names = p.strategy_names();"
        "loaded = [m for m in sys.modules if m.startswith('megatron_dcp.planner.baselines.')];"
        "assert not loaded and 'highspy' not in sys.modules, loaded; print(*names)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(BASELINES) <= set(found.stdout.split())
    assert set(BASELINES) <= set(strategy_names())


def _grid_profile() -> CostProfile:
    return replace(
        GROUPED, name="grid", pairs="grid", attn_us_per_pair=0.0,
        attn_spatial_us_per_pair=4e-6, attn_temporal_us_per_pair=6e-6,
    )  # fmt: skip


@pytest.mark.parametrize("spec", CHEAP)
@pytest.mark.parametrize("lockstep", [1, 8])
def test_video_shapes(spec: str, lockstep: int) -> None:
    from megatron_dcp.data.generators import generate

    drawn = generate("video-short", 40, 5, images_per_video=2).workload
    asked = PlanRequest(
        workload=drawn,
        topology=Topology(data_ranks=8, ranks_per_node=8),
        profile=_grid_profile(),
        lockstep=lockstep,
    )
    function, parameter = find_strategy(spec)
    build_plan(asked, spec, function, lambda _: 1, parameter)
