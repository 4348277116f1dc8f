"""A scheme of one's own choice: the plan stays the plan, priced for the scheme."""

from __future__ import annotations

import pytest

from megatron_dcp.cost import Mode, pack_of
from megatron_dcp.errors import PlanError
from megatron_dcp.planner import PlanRequest, make_plan, with_scheme
from megatron_dcp.testing.plans import plan_request

LENGTHS = [900, 40, 33, 20, 8, 5, 1]


def request_of(ranks: int = 4) -> PlanRequest:
    return plan_request(LENGTHS, ranks)  # 4 heads, 2 KV heads


@pytest.mark.parametrize(
    ("scheme", "inner"), [("ring", 1), ("allgather", 1), ("ulysses", 4), ("hybrid", 2)]
)
def test_shared_placements_run_the_scheme_at_its_price(scheme: str, inner: int) -> None:
    request = request_of()
    plan = make_plan(request, "packed:4")
    forced = with_scheme(plan, request, scheme)
    assert {p.scheme for p in forced.placements} == {scheme}
    assert [p.samples for p in forced.placements] == [p.samples for p in plan.placements]
    for p in forced.placements:
        pack, mode = pack_of(request.profile, request.workload, p.samples), Mode(scheme, inner)
        assert p.inner_degree == inner
        assert p.time_us == request.cost.time_us(pack, 4, mode, p.recompute)
        assert p.bytes == request.cost.bytes(pack, 4, mode, p.recompute)
    assert forced.algorithm.endswith(f"+{scheme}")


def test_the_scheme_that_the_cost_model_chose_gives_the_plan_again() -> None:
    request = request_of()
    plan = make_plan(request, "packed:4")
    (chosen,) = {p.scheme for p in plan.placements}
    assert with_scheme(plan, request, chosen).placements == plan.placements


def test_placements_of_one_rank_stay_local() -> None:
    request = request_of()
    plan = make_plan(request, "packed:1")
    assert with_scheme(plan, request, "ring").placements == plan.placements


@pytest.mark.parametrize(
    ("scheme", "ranks", "message"),
    [
        ("ulysses", 3, r"ranks 0..2\) of degree 3 cannot run it with 4 heads, 2 KV heads"),
        ("hybrid", 2, "degree 2 cannot run it"),
        ("local", 2, "known are"),
        ("spiral", 2, "known are"),
    ],
)
def test_a_scheme_that_cannot_run_is_refused(scheme: str, ranks: int, message: str) -> None:
    request = request_of(ranks)
    plan = make_plan(request, f"packed:{ranks}")
    with pytest.raises(PlanError, match=message):
        with_scheme(plan, request, scheme)
