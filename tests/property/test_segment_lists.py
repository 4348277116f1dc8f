"""Any segment list, on every CPU path: forward, merge in place and gradients equal the dense
reference in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_dcp import _C, ops
from megatron_dcp.ops.reference import segment_attention_reference
from megatron_dcp.ops.segments import segment_tensor

PATHS = {
    torch.float64: ("scalar",),
    torch.float32: ("scalar", "avx2", "avx512"),
    torch.bfloat16: ("avx512_bf16", "amx_bf16"),
}
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 4e-2}


@st.composite
def cases(draw):
    total_q, total_k = draw(st.integers(0, 90)), draw(st.integers(0, 90))
    rows = []
    for _ in range(draw(st.integers(0, 5))):
        q_start = draw(st.integers(0, total_q))
        k_start = draw(st.integers(0, total_k))
        q_len = draw(st.integers(0, total_q - q_start))
        k_len = draw(st.integers(0, total_k - k_start))
        diagonal = draw(st.integers(-q_len - 3, k_len + 3))
        window = draw(st.one_of(st.just(-1), st.integers(0, q_len + k_len + 2)))
        rows.append((q_start, q_len, k_start, k_len, diagonal, window))
    kv_heads = draw(st.sampled_from([1, 2]))
    shape = {
        "heads": kv_heads * draw(st.sampled_from([1, 3])),
        "kv_heads": kv_heads,
        "dim": draw(st.sampled_from([8, 24, 64, 80])),
    }
    options = {"softcap": draw(st.sampled_from([0.0, 4.0]))}
    return total_q, total_k, rows, shape, options, draw(st.integers(0, 1 << 20))


def tensors(total_q, total_k, shape, seed, dtype):
    g = torch.Generator().manual_seed(seed)
    sizes = [(total_q, shape["heads"])] + [(total_k, shape["kv_heads"])] * 2
    return [torch.randn(n, h, shape["dim"], generator=g).to(dtype) for n, h in sizes]


def close(got, want, tolerance):
    live = torch.isfinite(want)
    assert torch.equal(live, torch.isfinite(got))
    if live.any():
        scale = want[live].abs().max().clamp_min(1.0)
        assert (got.double() - want)[live].abs().max() <= tolerance * scale


@pytest.mark.parametrize(
    ("dtype", "path"), [(d, p) for d, paths in PATHS.items() for p in paths], ids=str
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases())
def test_any_segment_list(dtype, path, case):
    try:
        _C.limit_cpu_path(path)
    except ValueError:
        pytest.skip(f"this machine has no {path}")
    try:
        check(dtype, case)
    finally:
        _C.limit_cpu_path("best")


def check(dtype, case):
    total_q, total_k, rows, shape, options, seed = case
    q, k, v = tensors(total_q, total_k, shape, seed, dtype)
    segments = segment_tensor(rows)
    exact = [x.double().clone().requires_grad_() for x in (q, k, v)]
    want_out, want_lse = segment_attention_reference(*exact, segments, **options)
    dout = torch.randn(want_out.shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    (want_out * dout.double()).sum().backward()
    want = [x.grad if x.grad is not None else torch.zeros_like(x) for x in exact]

    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = ops.segment_attention(*leaves, segments, **options)
    out.backward(dout)
    tolerance = TOLERANCE[dtype]
    close(out.detach(), want_out.detach(), tolerance)
    close(lse.detach(), want_lse.detach(), tolerance)
    for leaf, b in zip(leaves, want, strict=True):
        close(leaf.grad, b, tolerance)

    # One segment at a time, merged in place, gives the same result and the same gradients.
    run_out, run_lse = ops.new_accumulators(q)
    sums = [torch.zeros_like(x, dtype=run_out.dtype) for x in (q, k, v)]
    for part in segments.split(1):
        ops.segment_attention_forward(q, k, v, part, run_out, run_lse, **options)
    for part in segments.split(1):
        ops.segment_attention_backward(dout, q, k, v, run_out, run_lse, part, *sums, **options)
    close(run_out, want_out.detach(), tolerance)
    close(run_lse, want_lse.detach(), tolerance)
    for a, b in zip(sums, want, strict=True):
        close(a, b, tolerance)
