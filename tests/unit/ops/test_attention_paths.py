"""Every CPU path this machine has: error bars against float64, and bits that do not depend on the
number of threads or on what is packed beside a sequence."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from megatron_dcp import _C, ops
from megatron_dcp.ops.reference import varlen_attention_reference
from megatron_dcp.ops.segments import band_segment, full_segment, segment_tensor


def usable(path):
    try:
        _C.limit_cpu_path(path)
    except ValueError:
        return False
    finally:
        _C.limit_cpu_path("best")
    return True


FLOAT_PATHS = [p for p in ("scalar", "avx2", "avx512") if usable(p)]
PATHS = FLOAT_PATHS + [p for p in ("avx512_bf16", "amx_bf16") if usable(p)]
LOW = [torch.bfloat16, torch.float16]


def limited(name):
    _C.limit_cpu_path(name)
    yield name
    _C.limit_cpu_path("best")


@pytest.fixture(params=PATHS)
def path(request):
    yield from limited(request.param)


@pytest.fixture(params=FLOAT_PATHS)  # the others compute float32 as avx512 does
def float_path(request):
    yield from limited(request.param)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def make(total_q, total_k, heads=4, kv_heads=2, dim=64, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = [(total_q, heads, dim), (total_k, kv_heads, dim), (total_k, kv_heads, dim)]
    return [torch.randn(s, generator=g).to(dtype) for s in shapes]


def cu(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def outputs(fn, tensors, weight):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out = fn(*leaves)
    out.backward(weight.to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def sdpa(lengths):
    """torch's own attention, one call a sequence."""

    def run(q, k, v):
        parts = [x.split(lengths) for x in (q, k, v)]
        out = [
            F.scaled_dot_product_attention(
                *(x.transpose(0, 1)[None] for x in qkv), is_causal=True, enable_gqa=True
            )[0].transpose(0, 1)
            for qkv in zip(*parts, strict=True)
        ]
        return torch.cat(out)

    return run


def errors(got, want):
    return [
        float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(got, want, strict=True)
    ]


@pytest.mark.parametrize("dim", [8, 40, 64, 96, 128, 256])
def test_float32_error_is_at_most_twice_that_of_torch(float_path, dim):
    lengths = [300, 5, 64, 1]
    c = cu(lengths)
    tensors = make(370, 370, dim=dim)
    weight = torch.randn(370, 4, dim, generator=torch.Generator().manual_seed(dim))
    want = outputs(
        lambda *t: varlen_attention_reference(*t, c, c)[0],
        [t.double() for t in tensors],
        weight.double(),
    )
    ours = errors(outputs(lambda *t: ops.varlen_attention(*t, c, c)[0], tensors, weight), want)
    theirs = errors(outputs(sdpa(lengths), tensors, weight), want)
    for a, b in zip(ours, theirs, strict=True):
        assert a <= 2 * b + 1e-6, (ours, theirs)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 8, 24), (8, 4, 64)])
@pytest.mark.parametrize("name", [p for p in FLOAT_PATHS if p != "scalar"])
def test_float32_error_on_long_sequences(name, heads, kv_heads, dim, request):
    """Long enough for tasks of more rows, and of more keys, than the least."""
    _C.limit_cpu_path(name)
    request.addfinalizer(lambda: _C.limit_cpu_path("best"))
    lengths = [2100, 30]
    c = cu(lengths)
    tensors = make(2130, 2130, heads, kv_heads, dim)
    weight = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(dim))
    want = outputs(sdpa(lengths), [t.double() for t in tensors], weight.double())
    ours = errors(outputs(lambda *t: ops.varlen_attention(*t, c, c)[0], tensors, weight), want)
    theirs = errors(outputs(sdpa(lengths), tensors, weight), want)
    for a, b in zip(ours, theirs, strict=True):
        assert a <= 2 * b + 1e-6, (ours, theirs)


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(2, 1, 64), (1, 1, 128), (2, 2, 40)])
def test_16_bit_error_is_at_most_twice_that_of_the_naive_version(path, dtype, heads, kv_heads, dim):
    lengths = [261, 3, 20]
    c = cu(lengths)
    tensors = make(284, 284, heads, kv_heads, dim, dtype)
    weight = torch.randn(284, heads, dim).to(dtype)

    def naive(*t):
        return varlen_attention_reference(*t, c, c)[0]

    want = outputs(naive, [t.double() for t in tensors], weight.double())
    theirs = errors(outputs(naive, tensors, weight), want)
    ours = errors(outputs(lambda *t: ops.varlen_attention(*t, c, c)[0], tensors, weight), want)
    for a, b in zip(ours, theirs, strict=True):
        assert a <= 2 * b, (ours, theirs)


@pytest.mark.parametrize(("softcap", "spread"), [(50.0, 1.0), (50.0, 8.0), (2.0, 8.0)])
def test_softcap_error_is_at_most_twice_that_of_the_naive_version(float_path, softcap, spread):
    """A cap far above the scores multiplies every error of tanh near zero."""
    c = cu([200, 33])
    q, k, v = make(233, 233, dim=32)
    weight = torch.randn(q.shape, generator=torch.Generator().manual_seed(5))

    def naive(*t):
        return varlen_attention_reference(*t, c, c, softcap=softcap)[0]

    tensors = [q * spread, k, v]
    want = outputs(naive, [t.double() for t in tensors], weight.double())
    theirs = errors(outputs(naive, tensors, weight), want)
    ours = errors(
        outputs(lambda *t: ops.varlen_attention(*t, c, c, softcap=softcap)[0], tensors, weight),
        want,
    )
    for a, b in zip(ours, theirs, strict=True):
        assert a <= 2 * b + 1e-6, (ours, theirs)


def everything(tensors, c, dtype, options):
    weight = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    leaves = [t.clone().requires_grad_() for t in tensors]
    out, lse = ops.varlen_attention(*leaves, c, c, **options)
    out.backward(weight)
    return [out.detach(), lse.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": False, "window_size": (70, 30)}], ids=str)
@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "dim"),
    [([400, 3, 40], 3, 1, 64), ([700, 40], 8, 8, 16)],  # the longer: other tasks for other threads
    ids=["short", "long"],
)
def test_bits_do_not_depend_on_threads(
    path, threads, dtype, options, lengths, heads, kv_heads, dim
):
    c = cu(lengths)
    tensors = make(sum(lengths), sum(lengths), heads, kv_heads, dim, dtype)
    threads(1)
    one = everything(tensors, c, dtype, options)
    for n in (2, 3):
        threads(n)
        for a, b in zip(one, everything(tensors, c, dtype, options), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_bits_do_not_depend_on_packing(path, dtype):
    lengths = [37, 520, 1, 90]
    c = cu(lengths)
    tensors = make(sum(lengths), sum(lengths), 4, 2, 48, dtype)
    weight = torch.randn(tensors[0].shape).to(dtype)

    def run(parts, bounds, w):
        leaves = [t.clone().requires_grad_() for t in parts]
        out, _ = ops.varlen_attention(*leaves, bounds, bounds)
        out.backward(w)
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    packed = run(tensors, c, weight)
    for start, n in zip(c.tolist(), lengths, strict=False):
        rows = slice(start, start + n)
        alone = run([t[rows] for t in tensors], cu([n]), weight[rows])
        for a, b in zip(packed, alone, strict=True):
            assert torch.equal(a[rows], b)


@pytest.mark.parametrize(
    ("dtype", "dim"), [(torch.float32, 64), (torch.bfloat16, 64), (torch.float32, 40)]
)
def test_results_written_around_the_caches_have_the_same_bits(path, dtype, dim):
    """A pack whose out, dq, dk and dv pass 4 MiB, against one of its sequences alone."""
    if path == "scalar":
        pytest.skip("the scalar path has one way to write")
    length, count = 32, 4 * 2**20 // (32 * 8 * dim * dtype.itemsize) + 1
    tensors = make(length * count, length * count, 8, 8, dim, dtype)
    weight = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(9))

    def run(lengths, rows):
        at = cu(lengths)
        one = [x[rows] for x in (*tensors, weight)]
        return outputs(lambda q, k, v: ops.varlen_attention(q, k, v, at, at)[0], one[:3], one[3])

    packed = run([length] * count, slice(None))
    for n in (0, count // 2, count - 1):
        rows = slice(n * length, (n + 1) * length)
        for a, b in zip(packed, run([length], rows), strict=True):
            assert torch.equal(a[rows], b)


@pytest.mark.parametrize("dtype", [torch.float32, *LOW], ids=str)
def test_merged_segments_agree_with_the_scalar_path(path, dtype):
    q, k, v = make(500, 600, 2, 1, 64, dtype)
    segments = segment_tensor(
        [
            full_segment(3, 300, 10, 290),
            band_segment(200, 290, 295, 280, q_position=40, k_position=0, left=99),
        ]
    )
    dout = torch.randn(500, 2, 64)

    def run():
        out, lse = ops.new_accumulators(q)
        for part in segments.split(1):
            ops.segment_attention_forward(q, k, v, part, out, lse, softcap=5.0)
        sums = [torch.zeros(x.shape) for x in (q, k, v)]
        for part in segments.split(1):
            ops.segment_attention_backward(
                dout, q, k, v, out, lse, part, *sums, softcap=5.0, dlse=torch.ones_like(lse)
            )
        return [out, torch.where(torch.isfinite(lse), lse, 0.0), *sums]

    got = run()
    _C.limit_cpu_path("scalar")
    want = run()
    tolerance = 1e-5 if dtype != torch.bfloat16 or "bf16" not in path else 2e-2
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() <= tolerance * b.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dropout_masks_are_the_same_on_every_path(path, dtype):
    """Positions that start inside a group of four, run backwards, and pass 2^32."""
    tensors = make(300, 300, 2, 1, 32, dtype)
    c = cu([180, 120])
    positions = torch.cat([torch.arange(180) + 3, (1 << 33) + torch.arange(120).flip(0) * 3])
    options = {
        "dropout_p": 0.2,
        "rng_key": ops.make_rng_key(1, 2),
        "sample_ids": torch.tensor([4] * 180 + [9 + (1 << 40)] * 120),
        "q_positions": positions.roll(7),
        "k_positions": positions,
        "head_offset": 5,
        "window_size": (100, 0),
    }
    got = everything(tensors, c, dtype, options)
    _C.limit_cpu_path("scalar")
    want = everything(tensors, c, dtype, options)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() <= tolerance * b.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_an_earlier_call_left_behind_does_not_matter(path, dtype):
    """Scratch is kept between calls: fill it with NaN, then take less than a tile."""
    c = cu([200])
    nan = [torch.full((200, 1, 64), float("nan"), dtype=dtype) for _ in range(3)]
    everything(nan, c, dtype, {"softcap": 4.0})
    for n, dim in ((1, 8), (17, 40), (40, 64)):
        tensors = make(n, n, 1, 1, dim, dtype)
        for x in everything(tensors, cu([n]), dtype, {"softcap": 4.0}):
            assert torch.isfinite(x).all(), (n, dim)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("which", ["q", "k"])
def test_nan_in_a_score_reaches_out_lse_and_gradients(path, dtype, which):
    """A row that sees a NaN must not pass for one that sees nothing: a run would train on."""
    q, k, v = (torch.randn(90, 2, 16).to(dtype) for _ in range(3))
    {"q": q, "k": k}[which][70] = float("nan")
    seen = torch.arange(90) == 70 if which == "q" else torch.arange(90) >= 70
    cu = torch.tensor([0, 90])
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out, lse = ops.varlen_attention(*leaves, cu, cu)
    out.float().sum().backward()
    assert out[seen].isnan().all()
    assert lse[:, seen].isnan().all()
    assert not out[~seen][:64].isnan().any()
    assert leaves[0].grad[seen].isnan().all()
    out, lse = ops.new_accumulators(q)  # the running result of a ring
    with torch.no_grad():
        for first in (0, 45):
            part = segment_tensor([full_segment(0, 90, first, 45)])
            ops.segment_attention_forward(q, k, v, part, out, lse)
    rows = seen if which == "q" else torch.ones(90, dtype=torch.bool)
    assert out[rows].isnan().all()
    assert lse[:, rows].isnan().all()


def test_float64_is_always_scalar_and_bfloat16_takes_the_best_path():
    assert _C.cpu_path("float64") == "scalar"
    assert _C.cpu_path("float32") == FLOAT_PATHS[-1]
    assert _C.cpu_path("bfloat16") in (PATHS[-1], "avx512")


@pytest.mark.skipif("amx_bf16" not in PATHS, reason="this machine has no amx_bf16")
def test_a_refused_permission_for_amx_falls_back():
    """Linux refuses the tiles to a process with a signal stack that cannot hold them."""
    code = """
import ctypes
class Stack(ctypes.Structure):
    _fields_ = [("sp", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
room = ctypes.create_string_buffer(8192)
libc = ctypes.CDLL(None, use_errno=True)
stack = Stack(ctypes.addressof(room), 0, len(room))
assert libc.sigaltstack(ctypes.byref(stack), None) == 0
import torch
from megatron_dcp import _C
print(_C.cpu_path("bfloat16"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["avx512"]  # which Intel's cores run faster than avx512_bf16


@pytest.mark.skipif("amx_bf16" not in PATHS, reason="this machine has no amx_bf16")
def test_torch_keeps_its_own_use_of_amx_between_our_calls():
    """Both configure the tiles of the same thread."""
    c = cu([300])
    tensors = make(300, 300, dtype=torch.bfloat16)
    a = torch.randn(256, 256).bfloat16()
    product = a @ a
    first = everything(tensors, c, torch.bfloat16, {})
    for _ in range(3):
        assert torch.equal(a @ a, product)
        for x, y in zip(everything(tensors, c, torch.bfloat16, {}), first, strict=True):
            assert torch.equal(x, y)


def test_unknown_path_is_refused():
    with pytest.raises(ValueError, match="best, scalar, avx2"):
        _C.limit_cpu_path("sse9")
    with pytest.raises(ValueError, match="float64, float32"):
        _C.cpu_path("int8")
