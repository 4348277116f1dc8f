"""The memory-bound CUDA kernels, run by the SIMT shim, against numpy in float64."""

import ctypes
from ctypes import Structure, byref, c_double, c_int64, c_void_p

import numpy as np
import pytest
from shim_driver import DTYPES, Rows, Shim, ShimError, accumulation, blank, decode, encode

RNG = np.random.default_rng(8)
FLOATS = ["bf16", "fp16", "fp32", "fp64"]
#: Half a unit in the last place of the storage, doubled: one rounding of a result computed wider.
ULP = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 1e-6, "fp64": 1e-14}
LENGTHS = [7, 1, 130, 0, 513, 3, 64]  # of ATTENTION.md's simulation: nothing divides anything


class Stat(Structure):
    _fields_ = [("data", c_void_p), ("head_stride", c_int64), ("row_stride", c_int64)]

    @classmethod
    def of(cls, x: np.ndarray):
        return cls(x.ctypes.data, x.strides[0] // x.itemsize, x.strides[1] // x.itemsize)


class Heads(Structure):
    _fields_ = [("q", Rows), ("k", Rows), ("v", Rows), ("buffer", c_void_p)] + [
        (name, c_int64) for name in ("tokens", "degree", "heads", "kv_heads", "dim")
    ]


class Merge(Structure):
    _fields_ = (
        [(name, Rows) for name in ("out_a", "out_b", "out")]
        + [(name, Stat) for name in ("lse_a", "lse_b", "lse")]
        + [(name, c_int64) for name in ("rows", "heads", "dim")]
    )


class MergeGrad(Structure):
    _fields_ = (
        [("forward", Merge)]
        + [(name, Rows) for name in ("dout", "dout_a", "dout_b")]
        + [(name, Stat) for name in ("dlse", "dlse_a", "dlse_b")]
    )


class Rope(Structure):
    _fields_ = [("x", Rows), ("out", Rows), ("positions", c_void_p), ("frequencies", c_void_p),
                ("scale", c_double)] + [(name, c_int64) for name in
                ("tokens", "heads", "dim", "pairs", "interleaved", "inverse")]  # fmt: skip


class CrossEntropy(Structure):
    _fields_ = [(name, c_void_p) for name in ("logits", "labels", "weights", "lse", "losses",
                "loss")] + [(name, c_int64) for name in
                ("tokens", "vocab", "row_stride", "dtype")]  # fmt: skip


class CrossEntropyGrad(Structure):
    _fields_ = [("forward", CrossEntropy)] + [
        (name, c_void_p) for name in ("dloss", "dlse", "dlogits")
    ]


def invoke(shim: Shim, name: str, *arguments):
    """Calls a function of the library: arrays by address, ints as int64, structs by reference."""
    converted = []
    for value in (*arguments, None):  # the stream
        if isinstance(value, np.ndarray):
            converted.append(c_void_p(value.ctypes.data))
        elif isinstance(value, Structure):
            converted.append(byref(value))
        elif isinstance(value, (int, np.integer)):
            converted.append(c_int64(int(value)))
        else:
            converted.append(c_void_p(value))
    code = getattr(shim.library, name)(*converted)
    if code != 0:
        raise ShimError(code, shim.library.mdcp_emulate_last_error().decode())


def stored(dtype: str, *shape) -> np.ndarray:
    return encode(RNG.standard_normal(shape), dtype)


def zigzag(shim: Shim, lengths, degree: int, total: int):
    cu = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
    index, positions = np.full(total, -7, np.int64), np.full(total, -7, np.int64)
    cu_rank = np.full((degree, len(cu)), -7, np.int64)
    invoke(shim, "mdcp_cuda_zigzag", cu, len(lengths), degree, total, index, positions, cu_rank)
    return index, positions, cu_rank


@pytest.mark.parametrize("degree", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("schedule", ["leader", "random"])
def test_zigzag_deals_every_token_once(shim, degree, schedule):
    shim.configure(schedule, seed=degree)
    total = sum(LENGTHS) + 11
    index, positions, cu_rank = zigzag(shim, LENGTHS, degree, total)
    place = 0
    for rank in range(degree):
        start, lengths, base = place, [], 0
        for length in LENGTHS:
            held = []
            for chunk in (rank, 2 * degree - 1 - rank):
                held += range(chunk * length // (2 * degree), (chunk + 1) * length // (2 * degree))
            assert list(positions[place : place + len(held)]) == held
            assert list(index[place : place + len(held)]) == [base + p for p in held]
            place += len(held)
            base += length
            lengths.append(place - start)
        assert list(cu_rank[rank]) == [0, *lengths]
    assert place == sum(LENGTHS)
    assert (index[place:] == -1).all()
    assert (positions[place:] == 0).all()


def test_zigzag_of_more_samples_than_threads(shim):
    lengths = RNG.integers(0, 5, 700)
    index, _, cu_rank = zigzag(shim, lengths, 3, int(lengths.sum()))
    assert np.array_equal(np.sort(index), np.arange(lengths.sum()))
    assert cu_rank[:, -1].sum() == lengths.sum()


def test_zigzag_traps_on_lengths_beyond_the_total(shim):
    with pytest.raises(ShimError, match="trapped"):
        zigzag(shim, LENGTHS, 2, 10)


@pytest.mark.parametrize("row_bytes", [1, 2, 6, 8, 48, 528, 4096])
def test_gather_rows(shim, row_bytes):
    x = RNG.integers(0, 255, (50, row_bytes)).astype(np.uint8)
    index = RNG.integers(-1, 50, 70).astype(np.int64)
    out = np.full((70, row_bytes), 99, np.uint8)
    invoke(shim, "mdcp_cuda_gather_rows", out, x, index, 70, 50, row_bytes)
    assert np.array_equal(out, np.where((index < 0)[:, None], 0, x[index]))


def test_gather_traps_on_a_row_that_is_not_there(shim):
    x, index, out = np.zeros((4, 16)), np.array([0, 4]), np.zeros((2, 16))
    with pytest.raises(ShimError, match=r"trapped at move.cu"):
        invoke(shim, "mdcp_cuda_gather_rows", out, x, index, 2, 4, 128)


@pytest.mark.parametrize("dtype", FLOATS)
def test_scatter_rows_adds_in_order(shim, dtype):
    """Rows that meet are added one after the other, rounded each time, under any schedule."""
    x = stored(dtype, 60, 37)
    index = RNG.integers(-1, 20, 60).astype(np.int64)
    wanted = encode(np.zeros((30, 37)), dtype)
    for row, to in enumerate(index):
        if to >= 0:
            wide = np.float64 if dtype == "fp64" else np.float32
            total = decode(wanted[to], dtype).astype(wide) + decode(x[row], dtype).astype(wide)
            wanted[to] = encode(total, dtype)
    for schedule in ("lockstep", "random", "laggard"):
        shim.configure(schedule, seed=4)
        out, scratch = encode(np.zeros((30, 37)), dtype), np.full(60, -5, np.int32)
        call = shim.library.mdcp_cuda_scatter_rows
        code = call(*(c_void_p(a.ctypes.data) for a in (out, x, index)), c_int64(60), c_int64(30),
                    c_int64(37), ctypes.c_int(DTYPES[dtype]), c_void_p(scratch.ctypes.data),
                    None)  # fmt: skip
        assert code == 0
        assert np.array_equal(out, wanted)


def test_scatter_undoes_gather(shim):
    index, _, _ = zigzag(shim, LENGTHS, 4, sum(LENGTHS))
    x = stored("fp32", sum(LENGTHS), 6)
    dealt, back = np.empty_like(x), np.zeros_like(x)
    invoke(shim, "mdcp_cuda_gather_rows", dealt, x, index, len(x), len(x), 24)
    scratch = np.zeros(2 * len(x), np.int32)
    shim.library.mdcp_cuda_scatter_rows(
        *(c_void_p(a.ctypes.data) for a in (back, dealt, index)), c_int64(len(x)),
        c_int64(len(x)), c_int64(6), DTYPES["fp32"], c_void_p(scratch.ctypes.data), None
    )  # fmt: skip
    assert np.array_equal(back, x)


@pytest.mark.parametrize(("heads", "kv_heads", "degree"), [(8, 4, 2), (8, 2, 4), (6, 1, 3),
                                                           (4, 4, 1), (4, 0, 4)])  # fmt: skip
@pytest.mark.parametrize(("dtype", "dim"), [("bf16", 64), ("bf16", 5), ("fp64", 12)])
def test_ulysses_buffers(shim, heads, kv_heads, degree, dtype, dim):
    tokens = 13
    fused = stored(dtype, tokens, heads + 2 * kv_heads, dim)  # q, k, v are views of one tensor
    q, k, v = np.split(fused, [heads, heads + kv_heads], axis=1)
    h, kv = heads // degree, max(1, kv_heads // degree) if kv_heads else 0
    buffer = blank((degree, tokens, h + 2 * kv, dim), dtype)
    args = Heads(*(Rows.of(x, dtype) for x in (q, k, v)), buffer.ctypes.data, tokens, degree,
                 heads, kv_heads, dim)  # fmt: skip
    invoke(shim, "mdcp_cuda_ulysses_pack", args)
    for rank in range(degree):
        first = rank * kv_heads // degree
        block = [
            q[:, rank * h : (rank + 1) * h],
            k[:, first : first + kv],
            v[:, first : first + kv],
        ]
        assert np.array_equal(buffer[rank], np.concatenate(block, axis=1))

    sent = stored(dtype, *buffer.shape)
    targets = [blank(x.shape, dtype) for x in (q, k, v)]
    args = Heads(*(Rows.of(x, dtype) for x in targets), sent.ctypes.data, tokens, degree, heads,
                 kv_heads, dim)  # fmt: skip
    invoke(shim, "mdcp_cuda_ulysses_unpack", args)
    got = [decode(x, dtype) for x in targets]
    want = [np.zeros(x.shape) for x in targets]
    for rank in range(degree):
        block = decode(sent[rank], dtype)
        first = rank * kv_heads // degree
        want[0][:, rank * h : (rank + 1) * h] = block[:, :h]
        want[1][:, first : first + kv] += block[:, h : h + kv]
        want[2][:, first : first + kv] += block[:, h + kv :]
    for a, b in zip(got, want, strict=True):
        assert np.abs(a - b).max(initial=0) <= 8 * ULP[dtype]


def test_ulysses_refuses_a_degree_that_does_not_fit(shim):
    x = stored("bf16", 3, 6, 8)
    args = Heads(*(Rows.of(x, "bf16"),) * 3, x.ctypes.data, 3, 4, 6, 6, 8)
    with pytest.raises(ShimError) as refused:
        invoke(shim, "mdcp_cuda_ulysses_pack", args)
    assert refused.value.code == 10004


@pytest.mark.parametrize("row_bytes", [3, 32, 520])
def test_padding_rows_become_zero(shim, row_bytes):
    x = np.full((40, row_bytes), 7, np.uint8)
    cu = np.array([0, 5, 31], np.int64)
    invoke(shim, "mdcp_cuda_zero_padding", x, 40, row_bytes, cu, 2)
    assert (x[:31] == 7).all()
    assert not x[31:].any()


def joined(out_a, lse_a, out_b, lse_b):
    top = np.maximum(lse_a, lse_b)
    top = np.where(np.isneginf(top), 0, top)
    a, b = np.exp(lse_a - top), np.exp(lse_b - top)
    with np.errstate(divide="ignore", invalid="ignore"):
        lse = top + np.log(a + b)
        a, b = np.nan_to_num(a / (a + b)), np.nan_to_num(b / (a + b))
    return a, b, lse, a.T[..., None] * out_a + b.T[..., None] * out_b


@pytest.mark.parametrize("dtype", FLOATS)
def test_merge_and_its_gradient(shim, dtype):
    rows, heads, dim, wide = 11, 3, 40, accumulation(dtype)
    out_a, out_b, dout = (stored(dtype, rows, heads, dim) for _ in range(3))
    lse_a, lse_b, dlse = (stored(wide, heads, rows) * 40 for _ in range(3))
    dlse /= 40
    lse_a[:, 2:5] = -np.inf
    lse_b[:, 4:7] = -np.inf
    nan = encode(np.array(np.nan), dtype)
    out_a[2:5], out_b[4:7] = nan, nan  # what a part without keys holds does not count
    clean = [np.nan_to_num(decode(x, dtype)) for x in (out_a, out_b)]
    a, b, want_lse, want = joined(clean[0], lse_a.astype(float), clean[1], lse_b.astype(float))

    out, lse = blank(out_a.shape, dtype), blank(lse_a.shape, wide)
    forward = Merge(Rows.of(out_a, dtype), Rows.of(out_b, dtype), Rows.of(out, dtype),
                    Stat.of(lse_a), Stat.of(lse_b), Stat.of(lse), rows, heads, dim)  # fmt: skip
    invoke(shim, "mdcp_cuda_merge_lse", forward)
    assert np.abs(decode(out, dtype) - want).max() <= 4 * ULP[dtype]
    assert np.array_equal(np.isneginf(lse), np.isneginf(want_lse))
    finite = np.isfinite(want_lse)
    assert np.abs(lse[finite] - want_lse[finite]).max() <= 200 * ULP[wide]

    grads = [blank(out.shape, dtype), blank(out.shape, dtype)]
    dlses = [blank(lse.shape, wide), blank(lse.shape, wide)]
    invoke(shim, "mdcp_cuda_merge_lse_grad", MergeGrad(
        forward, Rows.of(dout, dtype), *(Rows.of(x, dtype) for x in grads), Stat.of(dlse),
        *(Stat.of(x) for x in dlses)))  # fmt: skip
    g = decode(dout, dtype)
    along = [np.einsum("thd,thd->ht", g, x) for x in clean]
    both = a * along[0] + b * along[1]
    for share, grad, dlse_part, dot in zip((a, b), grads, dlses, along, strict=True):
        assert np.abs(decode(grad, dtype) - share.T[..., None] * g).max() <= 4 * ULP[dtype]
        assert np.abs(dlse_part - share * (dot - both + dlse)).max() <= 100 * ULP[wide]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize(("dim", "pairs"), [(64, 32), (40, 12), (6, 0)])
def test_rope_from_positions(shim, dtype, interleaved, dim, pairs):
    tokens, heads = 9, 3
    x = stored(dtype, tokens, heads, dim)
    positions = RNG.integers(0, 1 << 20, tokens).astype(np.int64)
    frequencies = 10000.0 ** -(np.arange(pairs) / max(pairs, 1))
    out, back = blank(x.shape, dtype), blank(x.shape, dtype)
    fixed = (positions.ctypes.data, frequencies.ctypes.data, 1.25, tokens, heads, dim, pairs,
             interleaved)  # fmt: skip
    invoke(shim, "mdcp_cuda_rope", Rope(Rows.of(x, dtype), Rows.of(out, dtype), *fixed, 0))
    angle = positions[:, None] * frequencies
    turn = 1.25 * np.exp(1j * angle)[:, None]
    value = decode(x, dtype)
    want = value.copy()
    first = slice(0, 2 * pairs, 2) if interleaved else slice(0, pairs)
    second = slice(1, 2 * pairs, 2) if interleaved else slice(pairs, 2 * pairs)
    turned = (value[..., first] + 1j * value[..., second]) * turn
    want[..., first], want[..., second] = turned.real, turned.imag
    assert np.abs(decode(out, dtype) - want).max() <= 8 * ULP[dtype]
    fixed = (*fixed[:2], 0.8, *fixed[3:])
    invoke(shim, "mdcp_cuda_rope", Rope(Rows.of(out, dtype), Rows.of(back, dtype), *fixed, 1))
    assert np.abs(decode(back, dtype) - value).max() <= 16 * ULP[dtype]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("vocab", [1, 50, 3001])
def test_cross_entropy_and_its_gradient(shim, dtype, vocab):
    shim.configure("random", seed=vocab)
    check_cross_entropy(shim, dtype, vocab)


def check_cross_entropy(shim, dtype, vocab, tokens=7):
    wide = accumulation(dtype)
    logits = stored(dtype, tokens, vocab + 3)[:, :vocab]  # rows with a stride of their own
    logits[1, vocab // 2] = encode(np.array(-np.inf), dtype)
    labels = RNG.integers(0, vocab, tokens)
    labels[1] = 0
    labels[3] = -100
    weights = encode(RNG.random(tokens), wide)
    weights[4] = 0
    x = decode(np.ascontiguousarray(logits), dtype)
    if vocab == 1:
        logits[1] = encode(np.array(2.0), dtype)
        x[1] = 2
    top = x.max(1)
    want_lse = top + np.log(np.exp(x - top[:, None]).sum(1))
    counts = np.where(labels < 0, 0, weights.astype(float))
    want = (counts * (want_lse - x[np.arange(tokens), np.maximum(labels, 0)])).sum()

    lse, losses, loss = blank(tokens, wide), np.full(tokens, np.nan), blank((), wide)
    forward = CrossEntropy(logits.ctypes.data, labels.ctypes.data, weights.ctypes.data,
                           lse.ctypes.data, losses.ctypes.data, loss.ctypes.data, tokens, vocab,
                           vocab + 3, DTYPES[dtype])  # fmt: skip
    invoke(shim, "mdcp_cuda_cross_entropy", forward)
    assert np.abs(lse - want_lse).max() <= 20 * ULP[wide]
    assert abs(loss - want) <= 40 * ULP[wide] * max(abs(want), 1)

    dloss, dlse = encode(np.array(0.5), wide), stored(wide, tokens)
    grad = blank((tokens, vocab), dtype)
    invoke(shim, "mdcp_cuda_cross_entropy_grad", CrossEntropyGrad(
        forward, dloss.ctypes.data, dlse.ctypes.data, grad.ctypes.data))  # fmt: skip
    softmax = np.exp(x - want_lse[:, None])
    want_grad = softmax * (0.5 * counts + dlse)[:, None]
    want_grad[np.arange(tokens), np.maximum(labels, 0)] -= 0.5 * counts
    assert np.abs(decode(grad, dtype) - want_grad).max() <= 4 * ULP[dtype]


def test_a_label_outside_the_vocabulary_traps(shim):
    logits, labels = np.zeros((1, 4)), np.array([4])
    lse, losses, loss = np.zeros(1), np.zeros(1), np.zeros(())
    with pytest.raises(ShimError, match=r"trapped at rowwise.cu"):
        invoke(shim, "mdcp_cuda_cross_entropy", CrossEntropy(
            logits.ctypes.data, labels.ctypes.data, None, lse.ctypes.data, losses.ctypes.data,
            loss.ctypes.data, 1, 4, 4, DTYPES["fp64"]))  # fmt: skip
