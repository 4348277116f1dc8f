"""Every scheme x mask x degree equals dense attention on one process, in float64, to 1e-10."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from megatron_dcp.cost import Mode
from megatron_dcp.cost.model import wire_bytes_parts
from megatron_dcp.errors import PlanError
from megatron_dcp.plan import HeadLimits, Placement, check_plan
from megatron_dcp.schemes import scheme_names
from megatron_dcp.schemes.ulysses import repeats
from megatron_dcp.testing.gradients import rms_errors
from megatron_dcp.testing.plans import finish_plan, plan_request, tiny_profile
from megatron_dcp.testing.pool import WorkerPool

CASE = "megatron_dcp.testing.cases.attention:scheme_error"
MODEL = "megatron_dcp.testing.cases.scheme_model:model_error"
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
    """Every scheme of a degree, with its inner degree."""
    if degree == 1:
        return [("local", 1)]
    hybrids = [("hybrid", u) for u in range(2, degree) if degree % u == 0]
    return [("ring", 1), ("allgather", 1), ("ulysses", degree), *hybrids]


def heads_for(inner: int) -> dict[str, int]:
    """Head counts that an all-to-all over `inner` ranks can cut: 8 and 2 where these do."""
    if 8 % inner == 0:
        return {"heads": 8, "kv_heads": 2}
    return {"heads": 2 * inner, "kv_heads": inner}


MODES = [(d, s, u) for d in range(1, 9) for s, u in modes(d)]


def worst(results: list[dict[str, Any] | None]) -> tuple[float, str]:
    r = max((x for x in results if x is not None), key=lambda x: x["error"])
    return r["error"], r["where"]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("degree", "scheme", "inner"), MODES)
def test_equals_one_process(
    pool: WorkerPool, degree: int, scheme: str, inner: int, mask: str
) -> None:
    case = {"scheme": scheme, "inner": inner, **heads_for(inner), **MASKS[mask]}
    results = pool.run(degree, CASE, lengths=LENGTHS, **case)
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


# Once per scheme on degrees beyond eight; 12 and 24 are no powers of two. 48 heads, 2 KV heads.
WIDE = [
    (12, "ring", 1, "causal"),
    (12, "allgather", 1, "window"),
    (12, "hybrid", 4, "causal"),
    (12, "ulysses", 12, "full"),
    (16, "ring", 1, "window"),
    (16, "allgather", 1, "causal"),
    (16, "hybrid", 8, "causal"),
    (16, "ulysses", 16, "full"),
    (24, "ring", 1, "causal"),
    (24, "allgather", 1, "documents"),
    (24, "hybrid", 8, "prefix"),
    (24, "hybrid", 6, "two-sided-window"),
    (24, "ulysses", 24, "causal"),
]


@pytest.mark.parametrize(
    ("degree", "scheme", "inner", "mask"),
    [pytest.param(*c, marks=[pytest.mark.nightly] if c[0] > 16 else []) for c in WIDE],
)
def test_degrees_above_eight(
    pool: WorkerPool, degree: int, scheme: str, inner: int, mask: str
) -> None:
    results = pool.run(
        degree, CASE, lengths=LENGTHS, scheme=scheme, inner=inner, heads=48, **MASKS[mask]
    )
    error, where = worst(results)
    assert error <= TOLERANCE, where
    assert sum(r["tokens"] for r in results) == sum(LENGTHS)


@pytest.mark.parametrize("degree", range(2, 9))
def test_a_block_with_fewer_tokens_than_ranks(pool: WorkerPool, degree: int) -> None:
    """Samples of one token, and shards that stay empty, under every scheme."""
    for scheme, inner in modes(degree):
        for lengths in ([1], [1] * (degree - 1)):
            case = {"scheme": scheme, "inner": inner, "degree": degree, **heads_for(inner)}
            held = pool.run(8, CASE, lengths=lengths, first_rank=8 - degree, **case)
            assert worst(held)[0] <= TOLERANCE, (scheme, inner, lengths)
            assert 0 in [r["tokens"] for r in held if r is not None]


@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    lengths=st.lists(st.one_of(st.integers(1, 8), st.integers(1, 70)), min_size=1, max_size=6),
    pick=st.integers(0, 99),
    mask=st.sampled_from(["causal", "full", "window", "two-sided-window", "softcap"]),
    last=st.booleans(),
    seed=st.integers(0, 2**20),
)
@example(lengths=[1], pick=0, mask="causal", last=False, seed=0)
@example(lengths=[1, 2, 1], pick=1, mask="full", last=True, seed=0)
@pytest.mark.parametrize("degree", range(1, 9))
def test_any_lengths_on_any_block(
    pool: WorkerPool, degree: int, lengths: list[int], pick: int, mask: str, last: bool, seed: int
) -> None:
    """Blocks of every degree inside one world of eight ranks, at its beginning or its end."""
    found = modes(degree)
    scheme, inner = found[pick % len(found)]
    results = pool.run(
        8, CASE, lengths=lengths, scheme=scheme, inner=inner, seed=seed, degree=degree,
        first_rank=8 - degree if last else 0, **heads_for(inner), **MASKS[mask],
    )  # fmt: skip
    assert worst(results)[0] <= TOLERANCE, (scheme, inner)
    assert sum(r["tokens"] for r in results if r is not None) == sum(lengths)


CLIPS = [[3, 2, 4], [1, 1, 1], [1, 5, 3], [6, 1, 2]]  # frames, height, width; an image, one patch
PICTURES = [[5, 4], [1, 1], [2, 9]]


@pytest.mark.parametrize(("degree", "scheme", "inner"), MODES)
def test_a_model_with_positions_on_a_grid(
    pool: WorkerPool, degree: int, scheme: str, inner: int
) -> None:
    """Two layers, rotary by each patch's place in its own grid, which comes by exchange with it."""
    for shapes, causal in ((CLIPS, False), (PICTURES, True)):
        case = {"scheme": scheme, "inner": inner, **heads_for(inner)}
        results = pool.run(degree, MODEL, shapes=shapes, causal=causal, **case)
        error, where = worst(results)
        assert error <= TOLERANCE, where


@pytest.mark.parametrize("degree", range(2, 9))
def test_bytes_on_the_wire_are_those_of_the_cost_model(pool: WorkerPool, degree: int) -> None:
    lengths = [53, 120, 9]
    for scheme, inner in modes(degree):
        heads = heads_for(inner)
        profile = tiny_profile(head_dim=8, **heads)
        results = pool.run(degree, CASE, lengths=lengths, scheme=scheme, inner=inner, **heads)
        parts = wire_bytes_parts(profile, Mode(scheme, inner), sum(lengths), degree)
        for index, kind in enumerate(("ulysses", "ulysses.backward")):
            sent = sum(r["sent"].get(kind, 0) for r in results)
            assert sent == pytest.approx(parts[index] * degree, abs=1e-6)
        outer = "allgather" if scheme == "allgather" else "ring"
        for index, kind in ((2, outer), (3, f"{outer}.backward")):
            sent = sum(r["sent"].get(kind, 0) for r in results)
            assert sent == pytest.approx(parts[index] * degree, abs=1e-6)


@pytest.mark.parametrize("scheme", ["ring", "allgather"])
@pytest.mark.parametrize("mask", [{"window_size": [8, 0]}, {"documents": [[40] * 8]}])
def test_messages_that_nobody_needs_are_skipped(
    pool: WorkerPool, scheme: str, mask: dict[str, Any]
) -> None:
    """With a window or documents shorter than two chunks only neighbouring chunks travel."""
    case = {"lengths": [320], "scheme": scheme, "inner": 1, "heads": 8}
    whole = pool.run(8, CASE, **case)
    part = pool.run(8, CASE, **case, **mask)
    assert worst(part)[0] <= TOLERANCE
    for kind in (scheme, f"{scheme}.backward"):
        sent = [sum(r["sent"].get(kind, 0) for r in x) for x in (whole, part)]
        assert 0 < sent[1] <= sent[0] / 3


def test_allgather_holds_two_groups_of_heads_at_once(pool: WorkerPool) -> None:
    """Of four: the one that is computed and the one that is coming."""
    case = "megatron_dcp.testing.cases.gathered:gathered_case"
    assert pool.run(2, case, length=50, kv_heads=8, groups=4) == [[4, 2], [4, 2]]


DRIFT = 1.05  # the error of a degree may be this much of that of one rank
# With more ranks than KV heads their gradients come home in rounded parts: one rounding more, as
# large as the one of the result, which is all there is where weights are not rounded (AVX2).
REPEATED = 2**0.5 * DRIFT


@pytest.mark.parametrize(("degree", "scheme", "inner"), [m for m in MODES if m[0] in (2, 3, 8)])
def test_bf16_drift_does_not_grow_with_the_degree(
    pool: WorkerPool, degree: int, scheme: str, inner: int
) -> None:
    """Partial results are merged in float32: the error is that of one rank's own rounding.

    benchmarks/schemes/drift.py prints all degrees, at greater lengths.
    """
    heads, errors = heads_for(inner), []
    for name, ranks, u in (("local", 1, 1), (scheme, degree, inner)):
        case = {"scheme": name, "inner": u, "degree": ranks, "dim": 64, **heads}
        results = pool.run(8, CASE, lengths=[200, 31], dtype="bfloat16", **case)
        errors.append(rms_errors([r["squares"] for r in results if r is not None]))
    for name, alone in errors[0].items():
        limit = REPEATED if inner > heads["kv_heads"] and name in ("dk", "dv") else DRIFT
        assert errors[1][name] <= limit * alone, (name, errors[1][name] / alone)


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
