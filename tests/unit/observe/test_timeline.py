"""The timeline is a readable PNG with planned and measured lanes."""

import pytest

from megatron_dcp.errors import ConfigError
from megatron_dcp.observe.timeline import draw_step
from megatron_dcp.plan import CostRef, Placement, StepPlan, Topology, Workload


def plan_of(*placements):
    return StepPlan(
        strategy="dcp", algorithm="hand", topology=Topology(data_ranks=2, ranks_per_node=2),
        lockstep=1, cost=CostRef(name="unit", digest="0" * 16), budget_bytes=1, layers=1,
        workload=Workload(lengths=(10, 5)), placements=placements, makespan_us=1500,
        lower_bound_us=1500, info={"idle": 0.25},
    )  # fmt: skip


def png_size(path):
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def test_planned_and_measured_lanes(tmp_path):
    plan = plan_of(
        Placement(slot=0, first_rank=0, degree=2, samples=(0,), scheme="ulysses", inner_degree=2,
                  time_us=1000, recompute=1),
        Placement(slot=1, first_rank=0, degree=1, samples=(1,), time_us=500),
    )  # fmt: skip
    events = [
        {"rank": 0, "step": 0, "kind": "placement", "degree": 2, "start_us": 5, "end_us": 990},
        {"rank": 0, "step": 0, "kind": "comm", "start_us": 100, "end_us": 200},
        {"rank": 1, "step": 0, "kind": "wait", "start_us": 1000, "end_us": 1500},
        {"rank": 1, "step": 0, "kind": "reduce", "start_us": 1500, "end_us": 1600},
    ]
    both = draw_step(plan, events, tmp_path / "both.png", "step 0, dcp")
    planned = draw_step(plan, [], tmp_path / "planned.png", "step 0, dcp")
    assert png_size(both)[1] > png_size(planned)[1] > 200
    assert both.stat().st_size < 300_000


def test_an_empty_plan_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no placement"):
        draw_step(plan_of(), [], tmp_path / "none.png", "")
    assert not (tmp_path / "none.png").exists()
