"""Random numbers belong to the sample: any plan, any number of ranks, recomputed or not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import megatron_dcp as mdcp
from megatron_dcp.errors import ConfigError
from megatron_dcp.testing.pool import WorkerPool

CASES = "megatron_dcp.testing.cases.dropout"


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_gradients_with_dropout_equal_one_process(pool: WorkerPool, ranks: int, seed: int) -> None:
    for r in pool.run(ranks, f"{CASES}:dropout_case", seed=seed):
        assert r["error"] <= 1e-10, r
        assert r["loss_error"] <= 1e-12


@pytest.mark.parametrize(
    ("ranks", "scheme"),
    [(1, "local"), (2, "ulysses"), (2, "ring"), (2, "allgather"), (4, "hybrid"), (4, "ring")],
)
def test_attention_dropout_is_the_same_under_every_scheme(
    pool: WorkerPool, ranks: int, scheme: str
) -> None:
    """Masks of attention probabilities belong to the sample: one process, one sample at a time."""
    options = {"seed": 7, "attention_dropout": 0.4, "schemes": [scheme]}
    for r in pool.run(ranks, f"{CASES}:dropout_case", **options):
        assert r["error"] <= 1e-10, r
        assert r["loss_error"] <= 1e-12
        assert scheme in r["schemes"]


def test_attention_dropout_needs_a_seed_and_drops_the_right_share() -> None:
    q = torch.ones(400, 4, 8, dtype=torch.float64)
    v = torch.ones(400, 2, 8, dtype=torch.float64)
    with mdcp.packed([400]):
        with pytest.raises(ConfigError, match="sample_dropout"):
            mdcp.attention(q, v, v, dropout_p=0.25)
        with mdcp.sample_dropout(1):
            out = mdcp.attention(q, v, v, causal=False, dropout_p=0.25)
            again = mdcp.attention(q, v, v, causal=False, dropout_p=0.25)
    assert float(out.mean()) == pytest.approx(1.0, abs=0.01)  # 640,000 pairs of weight 1/400 each
    assert float(out.std()) > 0
    assert not torch.equal(out, again), "another site, other masks"


def test_some_of_these_plans_recompute(pool: WorkerPool) -> None:
    found = [pool.run(2, f"{CASES}:dropout_case", seed=s)[0]["recomputed"] for s in range(3)]
    assert max(found) > 0


def test_noise_is_the_same_on_every_degree(pool: WorkerPool) -> None:
    lengths = [9, 1, 4]
    alone = pool.run(1, f"{CASES}:noise_case", lengths=lengths, degree=1)[0]
    assert len(alone) == sum(lengths)
    for degree in (2, 4):
        merged: dict[str, list[float]] = {}
        for part in pool.run(4, f"{CASES}:noise_case", lengths=lengths, degree=degree):
            merged.update(part)
        assert merged == alone
    timesteps = {key.split("/")[0]: tuple(row[3:]) for key, row in alone.items()}
    assert all(tuple(row[3:]) == timesteps[key.split("/")[0]] for key, row in alone.items())
    assert len(set(timesteps.values())) == 3


def test_numbers_have_the_right_distribution() -> None:
    with mdcp.packed([20_000]) as pack:
        g = mdcp.sample_generator(seed=1, placement=pack)
        u, n = g.uniform(4, dtype=torch.float64), g.normal(4, dtype=torch.float64)
    assert 0.0 < float(u.min()) < float(u.max()) < 1.0
    # 80,000 numbers: standard errors are 0.001 (mean of u) and 0.0035 (mean of n).
    assert float(u.mean()) == pytest.approx(0.5, abs=0.005)
    assert float(u.var()) == pytest.approx(1 / 12, abs=0.002)
    assert float(n.mean()) == pytest.approx(0.0, abs=0.018)
    assert float(n.var()) == pytest.approx(1.0, abs=0.03)
    correlation = torch.corrcoef(u.T) - torch.eye(4)
    assert float(correlation.abs().max()) < 0.04


def test_sites_seeds_and_samples_differ() -> None:
    with mdcp.packed([50, 50]) as pack:
        a = mdcp.sample_generator(seed=1, site=0, placement=pack).uniform(1)
        b = mdcp.sample_generator(seed=1, site=1, placement=pack).uniform(1)
        c = mdcp.sample_generator(seed=2, site=0, placement=pack).uniform(1)
    assert not torch.equal(a, b)
    assert not torch.equal(a, c)
    assert not torch.equal(a[:50], a[50:])


def test_dropout_keeps_the_expectation_and_is_off_in_evaluation() -> None:
    x = torch.ones(4000, 8, dtype=torch.float64)
    with mdcp.packed([4000]), mdcp.sample_dropout(3):
        y = F.dropout(x, 0.25)
        assert float(y.mean()) == pytest.approx(1.0, abs=0.02)
        assert set(y.unique().tolist()) == {0.0, 1.0 / 0.75}
        assert not torch.equal(y, F.dropout(x, 0.25))  # another site
        assert torch.equal(F.dropout(x, 0.25, training=False), x)


def test_dropout_of_something_that_is_not_tokens_is_refused() -> None:
    with mdcp.packed([10]), mdcp.sample_dropout(3), pytest.raises(ConfigError, match="10 tokens"):
        F.dropout(torch.ones(7, 10), 0.5)
