"""Video transformers: attention over the grid is exact on any block, and plans change no gradient.

Measure as in test_gradients.py: 1e-10 in float64 against one process that runs the clips one by one
with dense attention.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from megatron_dcp.testing.pool import WorkerPool

CASES = "tests.distributed.video_cases"
TOLERANCE = 1e-10
# Images and clips, prime sizes, a clip of single pixels, one token.
SHAPES = [[1, 1, 1], [1, 2, 3], [5, 2, 3], [3, 1, 4], [7, 1, 1], [2, 3, 3]]
FEW = [[1, 3, 3], [2, 1, 1]]  # fewer frames, and fewer pixels, than ranks


def modes(degree: int) -> list[tuple[str, int]]:
    if degree == 1:
        return [("local", 1)]
    out = [("ring", 1), ("allgather", 1), ("ulysses", degree)]
    return out + ([("hybrid", 2)] if degree == 4 else [])


@pytest.mark.parametrize(
    ("degree", "scheme", "inner"), [(d, *m) for d in (1, 2, 3, 4) for m in modes(d)]
)
def test_grid_attention_equals_dense(
    pool: WorkerPool, degree: int, scheme: str, inner: int
) -> None:
    for axis, shapes, moved in product(("space", "time"), (SHAPES, FEW), (True, False)):
        rows = axis if moved else "own"
        case = {"shapes": shapes, "scheme": scheme, "inner": inner, "axis": axis, "rows": rows}
        for r in pool.run(degree, f"{CASES}:grid_error", **case):
            assert r["error"] <= TOLERANCE, (axis, shapes, rows, r["where"])


def test_causal_in_time_and_rows_of_the_other_axis(pool: WorkerPool) -> None:
    case = {"shapes": SHAPES, "scheme": "ring", "inner": 1, "axis": "time", "rows": "space"}
    for causal in (False, True):
        for r in pool.run(3, f"{CASES}:grid_error", causal=causal, **case):
            assert r["error"] <= TOLERANCE, r["where"]


def test_dropout_in_a_switched_layout_is_of_the_tokens(pool: WorkerPool) -> None:
    """Where counts of rows agree, too: [4, 4, 4] is cut evenly in every layout."""
    for shapes in ([[4, 4, 4]], SHAPES, FEW):
        case = {"shapes": shapes, "scheme": "local", "inner": 1}
        (alone,) = pool.run(1, f"{CASES}:dropped", **case)
        for degree, scheme, inner in ((2, "ring", 1), (2, "ulysses", 2), (3, "allgather", 1)):
            case = {"shapes": shapes, "scheme": scheme, "inner": inner}
            together: dict[str, Any] = {}
            for r in pool.run(degree, f"{CASES}:dropped", **case):
                together |= r
            assert together == alone


@pytest.mark.nightly
@pytest.mark.parametrize("degree", [5, 6, 7, 8])
def test_grid_attention_on_more_ranks(pool: WorkerPool, degree: int) -> None:
    for axis in ("space", "time"):
        for scheme, inner in (("ring", 1), ("ulysses", degree)):
            for shapes in (SHAPES, FEW):
                case = {"shapes": shapes, "scheme": scheme, "inner": inner, "axis": axis}
                for r in pool.run(degree, f"{CASES}:grid_error", rows="own", **case):
                    assert r["error"] <= TOLERANCE, r["where"]


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("shapes", [SHAPES, FEW], ids=["many", "few"])
def test_every_token_is_on_one_rank_and_sequences_stay_whole(
    pool: WorkerPool, degree: int, shapes: list[list[int]]
) -> None:
    held = pool.run(degree, f"{CASES}:switch_case", shapes=shapes, scheme="ring", inner=1)
    total = sum(f * h * w for f, h, w in shapes)
    for layout in ("own", "space", "time"):
        rows = [tuple(x) for r in held for x in r[layout]]
        assert len(rows) == len(set(rows)) == total
    for layout in ("space", "time"):
        owner: dict[tuple[int, int], set[int]] = {}
        for rank, r in enumerate(held):
            for sample, position in r[layout]:
                area = shapes[sample][1] * shapes[sample][2]
                whole = position // area if layout == "space" else position % area
                owner.setdefault((sample, whole), set()).add(rank)
        assert all(len(ranks) == 1 for ranks in owner.values())
        longest = max(h * w if layout == "space" else f for f, h, w in shapes)
        for r in held:  # shares are even to within one sequence
            assert abs(len(r[layout]) - total / degree) <= longest


def test_moving_hidden_rows_sends_a_part_of_what_qkv_would(pool: WorkerPool) -> None:
    """Rows already by axis: attention sends nothing; and no switch sends more than all rows."""
    shapes = [[12, 4, 4]]
    case = {"shapes": shapes, "scheme": "ulysses", "inner": 4, "axis": "time"}
    local = pool.run(4, f"{CASES}:grid_error", rows="time", **case)
    own = pool.run(4, f"{CASES}:grid_error", rows="own", **case)
    assert sum(r["sent"] for r in local) == 0
    row = 8 * 8  # one head of a token, bytes
    moved = 12 * 16 * 3 // 4  # three quarters of the tokens change their rank
    assert sum(r["sent"] for r in own) == moved * row * (4 + 2 + 2 + 4)
    for results in (local, own):
        assert sum(r["all"] for r in results) == sum(r["back"] for r in results)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ddp": {"wrapper": "ddp"},
    "idle-rank": {"idle_rank": True},
    "sample-normalized": {"normalize": "sample"},
    "lockstep": {"lockstep": "all"},
}


def check(results: list[dict[str, Any]]) -> None:
    for rank, r in enumerate(results):
        assert r["error"] <= TOLERANCE, f"rank {rank}: {r['error']} in {r['where']}"
        assert r["loss_error"] <= 1e-12
        assert not r["extra"]
    assert len({r["loss"] for r in results}) == 1


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_gradients_of_both_dits_under_random_plans(pool: WorkerPool, ranks: int) -> None:
    options = list(OPTIONS) if ranks in (2, 4) else ["plain"]
    for grid in ("1d", "2d"):
        for seed, option in enumerate(options):
            check(pool.run(ranks, f"{CASES}:dit_case", grid=grid, seed=seed, **OPTIONS[option]))


@pytest.mark.nightly
@pytest.mark.parametrize("grid", ["1d", "2d"])
@pytest.mark.parametrize("ranks", range(1, 9))
def test_gradients_of_both_dits_under_more_random_plans(
    pool: WorkerPool, ranks: int, grid: str
) -> None:
    for seed in range(10, 16):
        for option in OPTIONS.values():
            check(pool.run(ranks, f"{CASES}:dit_case", grid=grid, seed=seed, samples=12, **option))


@pytest.mark.parametrize("strategy", ["dcp", "static", "dcp-intra"])
def test_gradients_under_the_strategies(pool: WorkerPool, strategy: str) -> None:
    for grid in ("1d", "2d"):
        check(pool.run(2, f"{CASES}:dit_case", grid=grid, seed=3, strategy=strategy))


def test_these_plans_share_clips_and_recompute(pool: WorkerPool) -> None:
    found = [pool.run(4, f"{CASES}:dit_case", grid="2d", seed=s)[0] for s in range(3)]
    assert {s for r in found for s in r["schemes"]} >= {"ulysses", "ring", "allgather"}
    assert {d for r in found for d in r["degrees"]} == {1, 2, 3, 4}
    assert max(r["recomputed"] for r in found) > 0


def test_noise_time_and_captions_do_not_depend_on_plan_or_ranks(pool: WorkerPool) -> None:
    alone = pool.run(1, f"{CASES}:noise_case", seed=4, plan_seed=0)[0]
    times = {tuple(row[-2:]) for row in alone.values()}
    assert len(times) == 18  # one time and one caption draw per sample, all different
    for ranks, plan_seed in ((2, 1), (4, 2), (4, 3)):
        drawn: dict[str, list[float]] = {}
        for part in pool.run(ranks, f"{CASES}:noise_case", seed=4, plan_seed=plan_seed):
            assert not set(part) & set(drawn)
            drawn |= part
        assert drawn == alone
