"""`mdcp bench attention`: shape of the rows, and the baseline computes the same attention."""

from __future__ import annotations

import json

import pytest
import torch

from megatron_dcp import ops
from megatron_dcp.cli import bench_attention as bench
from megatron_dcp.errors import ConfigError

KEYS = {"case", "metric", "unit", "value", "baseline", "ratio", "bar", "ok"}


def test_rows_are_complete_and_their_verdicts_follow_from_the_ratio():
    told: list[str] = []
    found = bench.rows(
        only=("256x32",), dtypes=("float32",), threads=1, repeats=1, progress=told.append
    )
    assert [(r["case"], r["metric"]) for r in found] == [
        ("matmul 2048^3", "float32"),
        ("256x32", "float32 fwd"),
        ("256x32", "float32 bwd"),
    ]
    assert len(told) == len(found)
    for row in found:
        assert set(row) == KEYS
        assert row["value"] > 0
        if row["bar"] is not None:
            assert row["ok"] == (row["ratio"] >= row["bar"])
    assert bench.table(found).count("\n") == len(found) + 1


def test_the_baseline_is_the_same_attention():
    lengths = [5, 1, 17]
    q, k, v = (torch.randn(23, h, 16) for h in (4, 2, 2))
    cu = torch.tensor([0, *lengths]).cumsum(0)
    out, _ = ops.varlen_attention(q, k, v, cu, cu)
    torch.testing.assert_close(bench.split_sdpa(q, k, v, lengths), out, rtol=1e-5, atol=1e-5)


def test_the_ring_step_baseline_is_the_same_merge():
    q, k, v = (torch.randn(9, 2, 8) for _ in range(3))
    running, lse = ops.new_accumulators(q)
    segments = bench.segment_tensor([bench.full_segment(0, 9, 0, 9)])
    ops.segment_attention_forward(q, k.flip(0), v, segments, running, lse)
    want, want_lse = bench._torch_ring_step(q, k, v, running, lse)
    ops.segment_attention_forward(q, k, v, segments, running, lse)
    torch.testing.assert_close(running, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)


def test_processor_time_is_for_one_thread():
    with pytest.raises(ConfigError, match="threads=1"):
        bench.rows(cpu_time=True, threads=2)


def test_cpu_time_with_threads_is_refused_before_the_table(capsys):
    with pytest.raises(ConfigError, match="--cpu-time needs --threads 1"):
        bench.main(["--cpu-time", "--threads", "2"])
    assert capsys.readouterr().out == ""


def test_peak_memory_is_at_least_the_results():
    peak = bench.peak_bytes("256x32", "bfloat16", "ours")
    # out and three gradients of 8192 x 8 x 64 elements; what the heap already held may serve some.
    assert peak is None or 0 <= peak < 10 * 8192 * 8 * 64 * 2


def test_the_command_prints_one_json_object(capsys):
    options = ["--case", "256x32", "--dtype", "bfloat16", "--repeats", "1", "--threads", "1"]
    assert bench.main([*options, "--no-memory", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["schema"] == "mdcp.bench/1"
    assert [r["metric"] for r in printed["rows"]][1:] == ["bfloat16 fwd", "bfloat16 bwd"]
    assert "torch varlen_attn" in printed["left_out"]


def test_kernels_that_are_not_measured_are_named_with_a_reason(monkeypatch):
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    reasons = bench.left_out()
    assert list(reasons) == [
        "FlashAttention-2",
        "FlashAttention-3",
        "Transformer Engine",
        "cuDNN",
        "torch varlen_attn",
    ]
    assert reasons["FlashAttention-2"] == "not installed"
    monkeypatch.setattr(bench, "find_spec", lambda name: name)
    assert bench.left_out()["FlashAttention-2"] == "runs on GPUs only"
    assert bench.left_out()["torch varlen_attn"] == "has no CPU kernel"
