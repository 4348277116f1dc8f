"""Every scheme x mask x degree equals dense attention on one process, in float64, to 1e-10."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_dcp.cost import Mode
from megatron_dcp.cost.model import wire_bytes_parts
from megatron_dcp.errors import PlanError
from megatron_dcp.plan import HeadLimits, Placement, check_plan
from megatron_dcp.schemes import scheme_names
from megatron_dcp.schemes.ulysses import repeats
from megatron_dcp.testing.plans import finish_plan, plan_request, tiny_profile
from megatron_dcp.testing.pool import WorkerPool

CASE = "megatron_dcp.testing.cases.attention:scheme_error"
TOLERANCE = 1e-10
LENGTHS = [7, 1, 61, 3, 13]  # shorter than the degree, one token, no multiples
MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window_size": [5, 0]},
    "two-sided-window": {"causal": False, "window_size": [3, 2]},
    "documents": {"documents": [[3, 4], [1], [20, 41], [0, 3], [13]]},
    "prefix": {"prefix": [2, 0, 40, 1, 13]},
    "softcap": {"softcap": 2.0},
}


def modes(degree: int) -> list[tuple[str, int]]:
    """Every scheme that 8 heads and 2 KV heads allow on a degree."""
    if degree == 1:
        return [("local", 1)]
    out = [("ring", 1), ("allgather", 1)]
    if 8 % degree == 0:
        out.append(("ulysses", degree))
    return out + [("hybrid", u) for u in (2, 4) if degree % u == 0 and u < degree]


# All masks on the degrees that most differ; the rest with those that cut chunks in other ways.
CASES = [
    (d, s, u, m)
    for d in range(1, 9)
    for s, u in modes(d)
    for m in (MASKS if d in (1, 2, 3, 8) else ("causal", "full", "window"))
]


def worst(results: list[dict[str, Any]]) -> tuple[float, str]:
    r = max(results, key=lambda x: x["error"])
    return r["error"], r["where"]


@pytest.mark.parametrize(("degree", "scheme", "inner", "mask"), CASES)
def test_equals_one_process(
    pool: WorkerPool, degree: int, scheme: str, inner: int, mask: str
) -> None:
    results = pool.run(
        degree, CASE, lengths=LENGTHS, scheme=scheme, inner=inner, heads=8, **MASKS[mask]
    )
    error, where = worst(results)
    assert error <= TOLERANCE, where
    assert sum(r["tokens"] for r in results) == sum(LENGTHS)


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("scheme", ["ulysses", "allgather"])
def test_kv_heads_fewer_than_equal_to_and_more_than_the_degree(
    pool: WorkerPool, scheme: str, kv_heads: int
) -> None:
    inner = 4 if scheme == "ulysses" else 1
    results = pool.run(
        4, CASE, lengths=[30, 5], scheme=scheme, inner=inner, heads=8, kv_heads=kv_heads
    )
    assert worst(results)[0] <= TOLERANCE


@pytest.mark.parametrize("scheme", ["ulysses", "ring", "allgather", "hybrid"])
def test_a_block_with_fewer_tokens_than_ranks(pool: WorkerPool, scheme: str) -> None:
    inner = {"ulysses": 4, "hybrid": 2}.get(scheme, 1)
    results = pool.run(4, CASE, lengths=[1, 1], scheme=scheme, inner=inner, heads=4)
    assert worst(results)[0] <= TOLERANCE
    assert 0 in [r["tokens"] for r in results]


# Once per scheme on a degree that is no power of two and more than one node of eight.
WIDE = [
    (12, "ring", 1, "causal"),
    (12, "allgather", 1, "window"),
    (12, "hybrid", 4, "causal"),
    (12, "ulysses", 12, "full"),
]


@pytest.mark.parametrize(("degree", "scheme", "inner", "mask"), WIDE)
def test_degrees_above_eight(
    pool: WorkerPool, degree: int, scheme: str, inner: int, mask: str
) -> None:
    results = pool.run(
        degree, CASE, lengths=LENGTHS, scheme=scheme, inner=inner, heads=24, **MASKS[mask]
    )
    error, where = worst(results)
    assert error <= TOLERANCE, where
    assert sum(r["tokens"] for r in results) == sum(LENGTHS)


@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=6),
    mode=st.sampled_from(modes(4)),
    mask=st.sampled_from(["causal", "full", "window"]),
    seed=st.integers(0, 2**20),
)
def test_any_lengths(
    pool: WorkerPool, lengths: list[int], mode: tuple[str, int], mask: str, seed: int
) -> None:
    results = pool.run(
        4, CASE, lengths=lengths, scheme=mode[0], inner=mode[1], heads=8, seed=seed, **MASKS[mask]
    )
    assert worst(results)[0] <= TOLERANCE


@pytest.mark.parametrize("degree", [2, 3, 4, 6, 8])
def test_bytes_on_the_wire_are_those_of_the_cost_model(pool: WorkerPool, degree: int) -> None:
    lengths = [53, 120, 9]
    profile = tiny_profile(heads=8, kv_heads=2, head_dim=8)
    for scheme, inner in modes(degree):
        results = pool.run(degree, CASE, lengths=lengths, scheme=scheme, inner=inner, heads=8)
        parts = wire_bytes_parts(profile, Mode(scheme, inner), sum(lengths), degree)
        for index, kind in enumerate(("ulysses", "ulysses.backward")):
            sent = sum(r["sent"].get(kind, 0) for r in results)
            assert sent == pytest.approx(parts[index] * degree, abs=1e-6)
        outer = "allgather" if scheme == "allgather" else "ring"
        for index, kind in ((2, outer), (3, f"{outer}.backward")):
            sent = sum(r["sent"].get(kind, 0) for r in results)
            assert sent == pytest.approx(parts[index] * degree, abs=1e-6)


def test_a_window_skips_ring_steps(pool: WorkerPool) -> None:
    """With a window shorter than a chunk only neighbouring chunks travel."""
    whole = pool.run(8, CASE, lengths=[320], scheme="ring", inner=1, heads=8)
    window = pool.run(8, CASE, lengths=[320], scheme="ring", inner=1, heads=8, window_size=[8, 0])
    assert worst(window)[0] <= TOLERANCE
    sent = [sum(r["sent"]["ring"] for r in x) for x in (whole, window)]
    assert sent[1] <= sent[0] / 3


@pytest.mark.parametrize("scheme", ["ulysses", "ring", "allgather"])
def test_bf16_drift_does_not_grow_with_the_degree(pool: WorkerPool, scheme: str) -> None:
    """Partial results are merged in float32: the error is that of one rank's own rounding."""
    errors = {}
    for degree in (1, 8):
        name = "local" if degree == 1 else scheme
        inner = degree if name == "ulysses" else 1
        results = pool.run(
            degree, CASE, lengths=[200, 31], scheme=name, inner=inner, heads=8, dtype="bfloat16"
        )
        errors[degree] = max(r["absolute"] for r in results)
    assert errors[8] <= 1.5 * errors[1]


@pytest.mark.parametrize(
    ("scheme", "inner"),
    [
        ("ring", 1),
        ("ulysses", 4),
        pytest.param("allgather", 1, marks=pytest.mark.nightly),
        pytest.param("hybrid", 2, marks=pytest.mark.nightly),
    ],
)
def test_a_peer_that_dies_inside_a_scheme_ends_the_others_by_name(scheme: str, inner: int) -> None:
    """Neighbours see the connection close and are told with whom and in what; nobody hangs."""
    workers = WorkerPool(timeout_s=200)
    results = workers.run(
        4,
        "megatron_dcp.testing.cases.faults:peer_killed",
        may_die=[2],
        scheme=scheme,
        inner=inner,
        victim=2,
    )
    assert results[2] is None
    told = [r["error"] for r in results if r is not None]
    assert all(told), "every rank that is left stops with an error"
    assert any(re.search(r"transfer with (rank 2|one of ranks .*\b2\b)", x) for x in told), told


def test_registry_has_the_schemes_that_plans_name() -> None:
    assert set(scheme_names()) == {"local", "ulysses", "ring", "allgather", "hybrid"}


@pytest.mark.parametrize(
    ("scheme", "inner", "degree"), [("ulysses", 3, 3), ("hybrid", 3, 6), ("ulysses", 8, 8)]
)
def test_an_impossible_scheme_is_refused_at_planning_time(
    scheme: str, inner: int, degree: int
) -> None:
    request = plan_request([50, 60], 8)  # 4 heads, 2 KV heads
    placement = Placement(
        slot=0, first_rank=0, degree=degree, samples=(0, 1), scheme=scheme, inner_degree=inner
    )
    with pytest.raises(PlanError, match=r"respects_degree_limits.*heads"):
        finish_plan(request, [placement])
    with pytest.raises(PlanError, match="use another degree"):
        repeats(4, 2, inner)


def test_the_head_limit_is_checked_against_the_model_that_runs() -> None:
    request = plan_request([50], 2)
    placement = Placement(
        slot=0, first_rank=0, degree=2, samples=(0,), scheme="ulysses", inner_degree=2
    )
    plan = finish_plan(request, [placement])
    with pytest.raises(PlanError, match="3 heads"):
        check_plan(plan, HeadLimits(heads=3, kv_heads=1))
