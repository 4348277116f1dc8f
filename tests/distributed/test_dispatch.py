"""Every rank gets exactly its tokens, labels, weights and payloads, by index or by exchange."""

from __future__ import annotations

import re

import pytest

from megatron_dcp.testing.cases.dispatch import DTYPES
from megatron_dcp.testing.pool import WorkerPool

EXCHANGE = "megatron_dcp.testing.cases.dispatch:exchange_case"
ERROR = "megatron_dcp.testing.cases.dispatch:exchange_error"
INDEX = "megatron_dcp.testing.cases.dispatch:index_case"


@pytest.mark.parametrize("dtype", DTYPES)
def test_exchange_carries_any_dtype(pool: WorkerPool, dtype: str) -> None:
    results = pool.run(4, EXCHANGE, seed=1, dtype=dtype)
    assert all(r["equal"] for r in results)
    assert sum(r["sent"] for r in results) > 0


@pytest.mark.parametrize("trailing", [[3], [2, 5]])
def test_exchange_carries_grids_and_pixels(pool: WorkerPool, trailing: list[int]) -> None:
    results = pool.run(4, EXCHANGE, seed=2, dtype="float32", trailing=trailing)
    assert all(r["equal"] for r in results)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", [3, 4])
def test_exchange_on_any_plan(pool: WorkerPool, ranks: int, seed: int) -> None:
    assert all(r["equal"] for r in pool.run(ranks, EXCHANGE, seed=seed))


def test_exchange_when_one_rank_holds_everything(pool: WorkerPool) -> None:
    """Ranks without samples learn the fields from the one that has them."""
    results = pool.run(4, EXCHANGE, seed=5, owner="first")
    assert all(r["equal"] for r in results)
    assert [r["sent"] > 0 for r in results] == [True, False, False, False]


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ("dtype", "AgreementError", "different fields.*rank 1"),
        ("length", "ConfigError", "rows, the plan says"),
        ("missing", "ConfigError", "should be on rank"),
    ],
)
def test_exchange_names_the_fault(pool: WorkerPool, fault: str, kind: str, message: str) -> None:
    for r in pool.run(2, ERROR, fault=fault):
        assert r["type"] == kind
        assert re.search(message, r["error"]), r["error"]


def test_a_fault_of_one_rank_stops_the_exchange_on_all(pool: WorkerPool) -> None:
    """The others must not wait for a rank that has raised."""
    other, faulty = pool.run(2, ERROR, fault="missing on rank 1")
    assert faulty["type"] == "ConfigError"
    assert other["type"] == "AgreementError"
    assert re.search(r"cannot start; rank 1: sample \d should be on rank 1", other["error"])


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_index_dispatch_covers_every_token_once(pool: WorkerPool, ranks: int, seed: int) -> None:
    results = pool.run(ranks, INDEX, seed=seed)
    lengths = results[0]["lengths"]
    assert sum(r["wrong"] for r in results) == 0
    rows = sorted(tuple(x) for r in results for x in r["rows"])
    assert rows == [(i, p) for i, n in enumerate(lengths) for p in range(n)]
    assert {r["denominator"] for r in results} == {sum(lengths) - len(lengths)}


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_reads_only_its_own_samples(pool: WorkerPool, ranks: int) -> None:
    results = pool.run(ranks, INDEX, seed=3, samples=12)
    for r in results:
        assert r["read"] == r["own"]
    assert sorted({i for r in results for i in r["read"]}) == list(range(12))
