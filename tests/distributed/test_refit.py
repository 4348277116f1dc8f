"""A cost profile that is far off is noticed while training, and replaced at a checkpoint."""

from __future__ import annotations

from pathlib import Path

from megatron_dcp.testing.pool import WorkerPool


def test_a_wrong_profile_is_refitted_alike_on_all_ranks(pool: WorkerPool, tmp_path: Path) -> None:
    case = "megatron_dcp.testing.cases.refit:refit_case"
    a, b = pool.run(2, case, folder=str(tmp_path), steps=24)
    assert a["metrics"] == b["metrics"]
    for r in (a, b):
        assert r["unchanged"], "the profile is replaced at a checkpoint and nowhere else"
        assert r["proposed"] == r["written"] == r["planned_with"] == r["in_checkpoint"]
        assert r["again"] is None, "one proposal is adopted once"
    assert a["proposed"] == b["proposed"]
    last = a["metrics"][-1]
    assert last["cost/observations"] >= 24
    assert last["cost/error_in_use"] > 0.5
    assert last["cost/error_refit"] < last["cost/error_in_use"] / 2
    assert [p.name for p in tmp_path.iterdir()] == [f"cost-{a['proposed']}.json"]
