"""A cost profile that is far off is noticed while training, and replaced only by a written file."""

from __future__ import annotations

from pathlib import Path

from megatron_dcp.testing.pool import WorkerPool


def test_a_wrong_profile_is_refitted_alike_on_all_ranks(pool: WorkerPool, tmp_path: Path) -> None:
    case = "megatron_dcp.testing.cases.refit:refit_case"
    a, b = pool.run(2, case, folder=str(tmp_path), steps=24)
    assert a["metrics"] == b["metrics"]
    assert a["unchanged"], "the engine goes on with its own profile"
    assert a["proposed"] == b["proposed"] == a["written"]
    last = a["metrics"][-1]
    assert last["cost/observations"] >= 24
    assert last["cost/error_in_use"] > 0.5
    assert last["cost/error_refit"] < last["cost/error_in_use"] / 2
    assert Path(a["path"]).name == f"cost-{a['proposed']}.json"
