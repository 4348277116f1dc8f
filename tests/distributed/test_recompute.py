"""Recomputation per microbatch: same gradients, fewer bytes, only the layers the plan names."""

from __future__ import annotations

import pytest

from megatron_dcp.testing.pool import WorkerPool

CASE = "megatron_dcp.testing.cases.recompute:recompute_case"
GRADIENT = "megatron_dcp.testing.cases.gradients:gradient_case"
LAYERS = 4


@pytest.mark.parametrize(
    ("ranks", "scheme", "inner"),
    [(1, "local", 1), (2, "ulysses", 2), (2, "ring", 1), (2, "allgather", 1), (4, "hybrid", 2)],
)
def test_every_level_gives_the_same_gradients_under_every_scheme(
    pool: WorkerPool, ranks: int, scheme: str, inner: int
) -> None:
    """Recomputed layers run twice, the others once; collectives of a block match throughout."""
    args = {"lengths": [30, 9, 1], "scheme": scheme, "inner": inner}
    plain = pool.run(ranks, CASE, recompute=0, **args)
    for level in (1, 3, LAYERS):
        results = pool.run(ranks, CASE, recompute=level, **args)
        for a, b in zip(plain, results, strict=True):
            assert b["gradient"] == a["gradient"], "bit for bit: the same operations again"
            assert b["calls"]["qkv"] == [2] * level + [1] * (LAYERS - level)


def test_kept_bytes_fall_linearly_with_the_level(pool: WorkerPool) -> None:
    """The memory model's form: kept * (L - r) + checkpoint * r, within 5 % of what is counted."""
    kept = [pool.run(1, CASE, recompute=r, lengths=[200, 56])[0]["kept"] for r in range(LAYERS + 1)]
    assert kept == sorted(kept, reverse=True)
    per_layer = (kept[0] - kept[LAYERS]) / LAYERS
    for r in range(LAYERS + 1):
        assert kept[r] == pytest.approx(kept[0] - r * per_layer, rel=0.05)
    checkpoint = 256 * 32 * 8  # the layer's input: tokens x hidden x float64
    assert kept[0] - kept[1] > 10 * checkpoint


def test_kept_bytes_grow_linearly_with_tokens(pool: WorkerPool) -> None:
    small, large = (pool.run(1, CASE, recompute=1, lengths=[n])[0]["kept"] for n in (128, 512))
    assert large == pytest.approx(4 * small, rel=0.05)


def test_selective_recomputes_the_named_module_alone(pool: WorkerPool) -> None:
    plain = pool.run(1, CASE, recompute=0, lengths=[40])[0]
    selective = pool.run(1, CASE, recompute=2, kind="selective", lengths=[40])[0]
    assert selective["gradient"] == plain["gradient"]
    assert selective["calls"]["qkv"] == [1] * LAYERS, "nothing else is recomputed"
    assert selective["kept"] <= plain["kept"]


@pytest.mark.parametrize("wrapper", ["bare", "ddp", "fsdp2"])
@pytest.mark.parametrize("seed", [0, 4])
def test_random_levels_per_placement_under_every_wrapper(
    pool: WorkerPool, wrapper: str, seed: int
) -> None:
    results = pool.run(4, GRADIENT, seed=seed, wrapper=wrapper)
    assert max(r["error"] for r in results) <= 1e-10
    assert max(r["recomputed"] for r in results) > 0
