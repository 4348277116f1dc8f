"""`mdcp profile` on real ranks: one profile for all, agreed out-of-memory points, resuming."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_dcp.testing.pool import WorkerPool

CASE = "megatron_dcp.testing.cases.profile:profile_case"


def test_all_ranks_fit_one_profile_and_a_second_call_measures_nothing(
    pool: WorkerPool, tmp_path: Path
) -> None:
    points = str(tmp_path / "p.points.jsonl")
    first = pool.run(2, CASE, points=points)
    assert first[0]["profile"] == first[1]["profile"]
    assert first[0]["ran"] == first[1]["ran"] > 30
    assert set(first[0]["errors"]) >= {"linear", "attention", "recompute", "communication"}
    profile = json.loads(first[0]["profile"])
    assert profile["linear_us_per_token"] > 0
    assert profile["links"][0]["max_degree"] == 2
    assert profile["fingerprint"]["data_ranks"] == 2
    again = pool.run(2, CASE, points=points)
    assert [r["ran"] for r in again] == [0, 0]
    assert again[0]["profile"] == first[0]["profile"]


def test_a_second_round_keeps_the_best_of_each_case(pool: WorkerPool, tmp_path: Path) -> None:
    file = tmp_path / "p.points.jsonl"
    first = pool.run(2, CASE, points=str(file), rounds=2)
    assert first[0]["profile"] == first[1]["profile"]
    measured = [json.loads(line) for line in file.read_text().splitlines()[1:]]
    times: dict[str, list[float]] = {}
    for m in measured:
        times.setdefault(json.dumps(m["case"]), []).append(m["time_us"])
    assert len(measured) > len(times), "some case was faster in the second round"
    assert all(t == sorted(t, reverse=True) for t in times.values())
    assert json.loads(first[0]["profile"])["fit"]["points"] == len(times)
    again = pool.run(2, CASE, points=str(file), rounds=2)
    assert [r["ran"] for r in again] == [0, 0]
    assert again[0]["profile"] == first[0]["profile"]


def test_one_rank_out_of_memory_is_agreed_by_all_and_rules_out_larger_cases(
    pool: WorkerPool, tmp_path: Path
) -> None:
    points = tmp_path / "p.points.jsonl"
    results = pool.run(2, CASE, points=str(points), oom_rank=1, oom_tokens=100)
    assert results[0]["profile"] == results[1]["profile"]
    assert json.loads(results[0]["profile"])["fit"]["out_of_memory"] >= 1
    measured = [json.loads(line) for line in points.read_text().splitlines()[1:]]
    full = [m for m in measured if m["oom"]]
    assert full
    for m in measured:
        per_rank = sum(m["case"]["lengths"]) / m["case"]["degree"]
        assert m["oom"] == (per_rank >= 100)
