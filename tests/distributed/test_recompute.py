"""Recomputation per microbatch: same gradients, fewer bytes, only the layers the plan names."""

from __future__ import annotations

import pytest

from megatron_dcp.cost.fit import fit
from megatron_dcp.testing.cases.recompute import live_bytes_case
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


FITTED = [(t, r) for t in (64, 128) for r in (0, LAYERS)]
HELD_OUT = [(96, 1), (160, 3)]


def features(tokens: int, level: int, layers: int = LAYERS) -> list[float]:
    """The memory model: base + tokens * (kept * (L - r) + checkpoint * r + once)."""
    return [tokens * (layers - level), tokens * level, tokens, 1.0]


@pytest.mark.parametrize("kind", ["layers", pytest.param("selective", marks=pytest.mark.nightly)])
def test_predicted_activation_bytes_are_those_counted_at_every_level(kind: str) -> None:
    """Within 5 % at lengths and levels that the fit has not seen; counted storage by storage."""
    counted = [kept for kept, _ in live_bytes_case(points=[*FITTED, *HELD_OUT], kind=kind)]
    known = fit([features(*p) for p in FITTED], [float(x) for x in counted[: len(FITTED)]])
    for point, bytes_ in zip(HELD_OUT, counted[len(FITTED) :], strict=True):
        predicted = sum(a * b for a, b in zip(known.coefficients, features(*point), strict=True))
        assert predicted == pytest.approx(bytes_, rel=0.05), point


@pytest.mark.nightly
def test_selective_keeps_what_is_outside_of_attention() -> None:
    """All levels selective: q, k, v, their rotations and the output are gone, in float32."""
    (plain, _), (selective, _), (whole, _) = (
        live_bytes_case(points=[(64, r)], kind=kind)[0]
        for r, kind in ((0, "selective"), (LAYERS, "selective"), (LAYERS, "layers"))
    )
    heads, kv_heads, dim = 4, 2, 16
    attention = (2 * heads + 3 * kv_heads + heads) * dim * 4 * 64 * LAYERS
    assert plain - selective >= attention
    assert whole < selective


def test_the_predicted_peak_is_the_counted_one_where_logits_outweigh_a_layer() -> None:
    """Within 5 % at every level: the peak is at the loss, as in any model with a vocabulary."""
    held_out = [(96, r) for r in range(LAYERS + 1)] + [(160, 3)]
    peaks = [peak for _, peak in live_bytes_case(points=[*FITTED, *held_out], vocab=1024)]
    known = fit([features(*p) for p in FITTED], [float(x) for x in peaks[: len(FITTED)]])
    for point, peak in zip(held_out, peaks[len(FITTED) :], strict=True):
        predicted = sum(a * b for a, b in zip(known.coefficients, features(*point), strict=True))
        assert predicted == pytest.approx(peak, rel=0.05), point


@pytest.mark.nightly
def test_a_fitted_model_against_the_peak_of_forward_and_backward() -> None:
    """Logits smaller than a layer: never short of the peak by more than 5 %, and at level r too
    high by at most r/L of what a layer keeps.

    The peak at the last level is a layer that is rebuilt, as large as the one that the level before
    keeps: recomputing the last layer saves nothing. A line through both ends lies above the rest.
    """
    peaks = [peak for _, peak in live_bytes_case(points=[*FITTED, *HELD_OUT])]
    known = fit([features(*p) for p in FITTED], [float(x) for x in peaks[: len(FITTED)]])
    for point, peak in zip([*FITTED, *HELD_OUT], peaks, strict=True):
        predicted = sum(a * b for a, b in zip(known.coefficients, features(*point), strict=True))
        print(f"{point}: counted {peak}, predicted {predicted / peak - 1:+.1%}")
        assert predicted >= 0.95 * peak, point
        # The line falls by (L - 1)/L of a layer from level to level.
        share = point[1] / (LAYERS - 1) * known.coefficients[0] * point[0]
        assert predicted <= 1.05 * peak + share, "at most r/L of a layer"


@pytest.mark.parametrize("wrapper", ["bare", "ddp", "fsdp2"])
@pytest.mark.parametrize("seed", [0, 4])
def test_random_levels_per_placement_under_every_wrapper(
    pool: WorkerPool, wrapper: str, seed: int
) -> None:
    results = pool.run(4, GRADIENT, seed=seed, wrapper=wrapper)
    assert max(r["error"] for r in results) <= 1e-10
    assert max(r["recomputed"] for r in results) > 0
