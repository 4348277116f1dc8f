"""The torch glue of the CUDA kernels, run on CPU tensors over the shim, against the CPU ops.

The library registers the glue in a namespace of its own; schemas are those of `megatron_dcp`.
"""

import pytest
import torch
from shim_driver import load_build_module

from megatron_dcp import ops  # registers megatron_dcp::, the schemas and the CPU kernels
from megatron_dcp.ops import relayout
from megatron_dcp.ops.rows import rope_frequencies

NAMES = [
    "segment_attention_forward",
    "segment_attention_backward",
    "segment_attention",
    "segment_attention_grad",
    "varlen_attention",
    "varlen_attention_grad",
    "zigzag_partition",
    "gather_rows",
    "scatter_rows",
    "ulysses_pack",
    "ulysses_unpack",
    "ulysses_join",
    "ulysses_split",
    "zero_padding_",
    "merge_lse",
    "merge_lse_grad",
    "rope",
    "cross_entropy",
    "cross_entropy_grad",
]
cpu = torch.ops.megatron_dcp


@pytest.fixture(scope="module")
def shim():
    library = torch.library.Library("megatron_dcp_shim", "DEF")
    for name in NAMES:
        schema = str(getattr(cpu, name).default._schema)
        library.define(schema.removeprefix("megatron_dcp::"))
    torch.ops.load_library(str(load_build_module().build_emulated_ops()))
    yield torch.ops.megatron_dcp_shim
    library._destroy()


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(5)


def both(shim, name, *args, **kwargs):
    """(shim, CPU) results of one op on the same inputs, as tuples."""
    results = []
    for namespace in (shim, cpu):
        got = getattr(namespace, name)(*args, **kwargs)
        results.append(got if isinstance(got, (tuple, list)) else (got,))
    return zip(*results, strict=True)


def close(pairs, tolerance):
    for got, want in pairs:
        assert got.dtype == want.dtype
        assert got.shape == want.shape
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("dim", [20, 64])
def test_varlen_attention(shim, dtype, dim):
    q = torch.randn(50, 4, dim).to(dtype)
    fused = torch.randn(60, 4, dim).to(dtype)  # k and v are views of one tensor
    k, v = fused[:, :2], fused[:, 2:]
    cu_q = torch.tensor([0, 13, 13, 40], dtype=torch.int32)
    cu_k = torch.tensor([0, 20, 25, 55], dtype=torch.int32)
    band = {"causal": False, "window_left": 9, "window_right": 2, "softcap": 3.0}
    close(both(shim, "varlen_attention", q, k, v, cu_q, cu_k, **band), TOLERANCE[dtype])
    out, lse = cpu.varlen_attention(q, k, v, cu_q, cu_k, **band)
    dout = torch.randn_like(out)
    dlse = torch.randn(1, 50, dtype=lse.dtype).expand(4, 50)
    grads = both(shim, "varlen_attention_grad", dout, q, k, v, out, lse, cu_q, cu_k, dlse, **band)
    close(grads, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_segments_in_place(shim, dtype):
    """Two ring steps merged in place, then gradients added step by step."""
    q, k, v = (torch.randn(40, 2, 64).to(dtype) for _ in range(3))
    steps = [torch.tensor([[0, 40, 0, 20, 0, -1]]), torch.tensor([[0, 40, 20, 20, -20, -1]])]
    dout = torch.randn(40, 2, 64).to(dtype)
    found = []
    for namespace in (shim, cpu):
        out, lse = ops.new_accumulators(q)
        grads = [torch.ones(x.shape) for x in (q, k, v)]
        for segments in steps:
            namespace.segment_attention_forward(q, k, v, segments, out, lse, softmax_scale=0.2)
        for segments in steps:
            namespace.segment_attention_backward(
                dout, q, k, v, out, lse, segments, *grads, softmax_scale=0.2
            )
        found.append((out, lse, *grads))
    close(zip(*found, strict=True), TOLERANCE[dtype])
    segments = torch.cat(steps)  # the same as one softmax, in the dtype of q
    close(both(shim, "segment_attention", q, k, v, segments), TOLERANCE[dtype])
    out, lse = cpu.segment_attention(q, k, v, segments)
    grads = both(shim, "segment_attention_grad", dout, q, k, v, out, lse, segments)
    close(grads, TOLERANCE[dtype])


def test_dropout_has_the_masks_of_the_cpu(shim):
    q, k, v = (torch.randn(30, 2, 64, dtype=torch.float64) for _ in range(3))
    cu = torch.tensor([0, 17, 30])
    where = [torch.repeat_interleave(torch.tensor([4, 9]), torch.tensor([17, 13])),
             torch.cat([torch.arange(17), torch.arange(13)])]  # fmt: skip
    keys = (where[0], where[1], where[1])
    options = {"dropout_p": 0.4, "rng_key": ops.make_rng_key(3, 1), "head_offset": 2}
    close(both(shim, "varlen_attention", q, k, v, cu, cu, *keys, **options), 1e-10)


def test_a_plan_is_reused_and_not_confused(shim):
    """Alternating segment lists: the cached plans and their counters serve each call rightly."""
    q, k, v = (torch.randn(150, 2, 64).bfloat16() for _ in range(3))
    lists = [torch.tensor([[0, 150, 0, 150, 0, -1]]), torch.tensor([[0, 90, 10, 60, 5, 30]])]
    for _ in range(3):
        for segments in lists:
            close(both(shim, "segment_attention", q, k, v, segments), TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("which", ["q", "k"])
def test_nan_in_a_score_reaches_out_and_lse(shim, dtype, which):
    """Lanes of a warp must not part over it, nor may a row with NaN pass for one without keys."""
    q, k, v = (torch.randn(70, 2, 16).to(dtype) for _ in range(3))
    {"q": q, "k": k}[which][41] = float("nan")
    seen = torch.arange(70) == 41 if which == "q" else torch.arange(70) >= 41
    cu = torch.tensor([0, 70])
    out, lse = shim.varlen_attention(q, k, v, cu, cu)
    assert out[seen].isnan().all()
    assert torch.equal(lse.isnan(), seen.expand(2, 70))
    out, lse = ops.new_accumulators(q)
    for first in (0, 35):  # in place, the NaN in the second part or already in the running result
        part = torch.tensor([[0, 70, first, 35, 70, -1]])
        shim.segment_attention_forward(q, k, v, part, out, lse, softmax_scale=0.2)
    rows = seen if which == "q" else torch.ones(70, dtype=torch.bool)
    assert out[rows].isnan().all()
    assert lse[:, rows].isnan().all()


def test_nan_in_merges_and_logits(shim):
    a, b = torch.randn(2, 4, 1, 8)
    la, lb = torch.randn(2, 1, 4)
    la[0, :2] = torch.tensor([float("nan"), float("-inf")])
    lb[0, :2] = torch.tensor([float("-inf"), float("nan")])
    for got, want in both(shim, "merge_lse", a, la, b, lb):
        assert torch.equal(got.isnan(), want.isnan())
        assert got.isnan().any()
    logits = torch.randn(3, 40)  # most threads have one logit or none
    logits[1, 7] = float("nan")
    loss, lse = shim.cross_entropy(logits, torch.tensor([0, 1, 2]), None)
    assert loss.isnan()
    assert lse.isnan().tolist() == [False, True, False]


def test_bounds_of_the_band_may_be_any_integer(shim):
    q, k, v = (torch.randn(20, 2, 16).bfloat16() for _ in range(3))
    far = (1 << 63) - 1
    for band in ((far, -1), (far, far), (1 << 40, (1 << 40) + 2), (3, far), (-far - 1, far)):
        segments = torch.tensor([[0, 20, 0, 20, *band]])
        close(both(shim, "segment_attention", q, k, v, segments), TOLERANCE[q.dtype])


def test_errors_name_op_shapes_and_architecture(shim):
    q = torch.randn(8, 2, 64).bfloat16()
    segments = torch.tensor([[0, 9, 0, 8, 0, -1]])
    with pytest.raises(RuntimeError, match=r"segment 0 .*leaves q of 8 rows"):
        shim.segment_attention(q, q, q, segments)
    out = torch.zeros(8, 2, 66).bfloat16()[:, :, 1:65]  # rows start off 16 bytes
    lse = torch.zeros(2, 8)
    segments[0, 1] = 8
    with pytest.raises(RuntimeError) as failed:
        shim.segment_attention_forward(q, q, q, segments, out, lse, softmax_scale=1.0, merge=False)
    for part in ("segment_attention_forward", "[8, 2, 64]", "16 bytes", "code 10003", "built for"):
        assert part in str(failed.value)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_moves(shim, dtype):
    cu = torch.tensor([0, 7, 8, 40, 40, 61], dtype=torch.int32)
    close(both(shim, "zigzag_partition", cu, 3, 70), 0)
    index = cpu.zigzag_partition(cu, 3, 70)[0]
    x = torch.randn(70, 3, 5).to(dtype)
    close(both(shim, "gather_rows", x, index), 0)
    close(both(shim, "gather_rows", torch.arange(70), index), 0)
    close(both(shim, "scatter_rows", x, index // 3, 70), 0)
    q, k, v = x.new_empty(70, 8, 16), x.new_empty(70, 2, 16), x.new_empty(70, 2, 16)
    for t in (q, k, v):
        t.normal_()
    close(both(shim, "ulysses_pack", q, k, v, 4), 0)
    buffer = cpu.ulysses_pack(q, k, v, 4)
    close(both(shim, "ulysses_unpack", buffer, 8, 2), 0)
    close(both(shim, "ulysses_split", q, 4), 0)
    close(both(shim, "ulysses_join", cpu.ulysses_split(q, 4)), 0)
    padded = [x.clone(), x.clone()]
    shim.zero_padding_(padded[0], cu)
    cpu.zero_padding_(padded[1], cu)
    close([padded], 0)


def test_zeroed_rows_have_no_gradient(shim, monkeypatch):
    monkeypatch.setattr(relayout, "_ops", shim)
    x = torch.randn(6, 3, requires_grad=True)
    y = x * 2
    ops.zero_padding_(y, torch.tensor([0, 1, 4]))
    y.sum().backward()
    assert x.grad[:4].eq(2).all()
    assert x.grad[4:].eq(0).all()
    assert y[4:].eq(0).all()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rows(shim, dtype):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    a, b, g = (torch.randn(9, 3, 24).to(dtype) for _ in range(3))
    la, lb, gl = (torch.randn(9, 3, dtype=wide).T for _ in range(3))  # strides of their own
    la[0, 2] = lb[0, 2] = lb[1, 5] = float("-inf")
    close(both(shim, "merge_lse", a, la, b, lb), TOLERANCE[dtype])
    close(both(shim, "merge_lse_grad", g, a, la, b, lb, gl), TOLERANCE[dtype])
    positions = torch.randint(0, 1 << 20, (9,))
    for options in ({}, {"interleaved": True, "inverse": True, "scale": 1.3}):
        close(both(shim, "rope", a, positions, rope_frequencies(16), **options), TOLERANCE[dtype])
    logits = torch.randn(9, 101).to(dtype)
    labels = torch.randint(0, 101, (9,))
    labels[2] = -100
    weights, dlse = torch.rand(9, dtype=wide), torch.randn(9, dtype=wide)
    close(both(shim, "cross_entropy", logits, labels, weights), 2e-5)
    lse = cpu.cross_entropy(logits, labels, weights)[1]
    dloss = torch.tensor(0.7, dtype=wide)
    args = (dloss, logits, labels, lse, weights, dlse)
    close(both(shim, "cross_entropy_grad", *args), TOLERANCE[dtype])
