"""Every CUDA attention kernel, run by the SIMT shim, against float64.

Bar: the error of naive low-precision code against float64, twice (plus 1e-6 of the largest value
for float32). Cases rotate through the schedules, so that each kernel meets unkind ones.
"""

import mmap

import numpy as np
import pytest
from shim_driver import COPIES, SCHEDULES, Problem, Shim, ShimError, accumulation, decode, encode
from shim_reference import backward, forward, merge, naive, visible

RNG = np.random.default_rng(20)
FULL = 1 << 40


def rounding(dtype):
    return lambda x: decode(encode(np.asarray(x, np.float64), dtype), dtype)


def random(dtype, *shape, scale=1.0):
    return rounding(dtype)(RNG.standard_normal(shape) * scale)


def problem(segments, rows_q, rows_k, dtype="bf16", heads=(2, 2), dim=64, **options):
    return Problem(
        random(dtype, rows_q, heads[0], dim),
        random(dtype, rows_k, heads[1], dim),
        random(dtype, rows_k, heads[1], dim),
        np.array(segments),
        dtype,
        **options,
    )


def error(found, wanted):
    return float(np.abs(found - wanted).max() / max(np.abs(wanted).max(), 1e-30))


def check(shim: Shim, p: Problem, with_dlse=False):
    """Forward and backward of one problem against float64; returns what the kernels gave."""
    round_ = rounding(p.dtype)
    dout = random(p.dtype, *p.q.shape)
    dlse = RNG.standard_normal((p.q.shape[1], len(p.q))).astype(np.float32) if with_dlse else None
    out, lse = shim.forward(p)
    wanted_out, wanted_lse = forward(p)
    assert np.array_equal(np.isneginf(lse), np.isneginf(wanted_lse))
    finite = np.isfinite(wanted_lse)
    assert np.abs(lse[finite] - wanted_lse[finite]).max(initial=0) < 2e-5
    wide_out, _ = shim.forward(p, out_dtype=accumulation(p.dtype))
    grads = shim.backward(p, dout, wide_out, lse, dlse)
    wanted = (wanted_out, *backward(p, dout, dlse))
    seen = visible(p.segments, len(p.q), len(p.k))
    floor = {"fp64": 1e-12, "fp32": 1e-6}.get(p.dtype, 0)
    bars = [
        2 * error(x, w) + floor
        for x, w in zip(naive(p, dout, round_), (wanted_out, *backward(p, dout)), strict=True)
    ]
    for name, found, want, bar in zip(
        ("out", "dq", "dk", "dv"), (out, *grads), wanted, bars, strict=True
    ):
        assert np.isfinite(found).all(), name
        assert error(found, want) <= bar, (name, error(found, want), bar)
        blind = seen.sum(1 if name in ("out", "dq") else 0) == 0
        assert not found[blind].any(), name
    return out, lse, grads


CAUSAL = [[0, 150, 0, 150, 0, -1]]
BOTTOM_RIGHT = [[0, 70, 0, 190, 120, -1]]
WINDOW = [[0, 200, 0, 200, 0, 37]]
FULL_RECTANGLE = [[0, 90, 0, 130, FULL, -1]]
PACKED = [[0, 5, 0, 5, 0, -1], [5, 131, 5, 131, 0, -1], [136, 1, 136, 1, 0, -1],
          [137, 63, 137, 63, 0, -1]]  # fmt: skip


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("segments", [CAUSAL, WINDOW], ids=["causal", "window"])
def test_tensor_cores_by_head_dim(shim, dtype, dim, segments):
    shim.configure(SCHEDULES[dim // 32 % 6], COPIES[dim // 32 % 3], seed=dim)
    check(shim, problem(segments, 200, 200, dtype, (1, 1), dim))


@pytest.mark.parametrize("segments", [BOTTOM_RIGHT, FULL_RECTANGLE, PACKED],
                         ids=["bottom-right", "full", "packed"])  # fmt: skip
@pytest.mark.parametrize("schedule", ["random", "leader", "laggard"])
def test_masks_under_unkind_schedules(shim, segments, schedule):
    shim.configure(schedule, "random", seed=3)
    check(shim, problem(segments, 200, 200))


@pytest.mark.parametrize("dim", [8, 40, 72, 80, 120, 136, 192])
def test_head_dims_between_tile_widths(shim, dim):
    check(shim, problem(PACKED, 200, 200, heads=(1, 1), dim=dim))


@pytest.mark.parametrize("heads", [(4, 2), (4, 1), (3, 1)])
def test_grouped_queries(shim, heads):
    shim.configure("random", seed=heads[0])
    check(shim, problem(PACKED, 200, 200, heads=heads), with_dlse=True)


@pytest.mark.parametrize("dtype", ["fp32", "fp64", "bf16", "fp16"])
@pytest.mark.parametrize("dim", [1, 33, 64, 256])
def test_scalar_kernels(shim, dtype, dim):
    shim.configure("random", "random", seed=dim)
    segments = [[0, 20, 0, 20, 0, -1], [20, 33, 20, 50, 17, 40], [53, 4, 0, 9, FULL, -1]]
    check(shim, problem(segments, 60, 75, dtype, (2, 1), dim, scalar=True), with_dlse=True)


@pytest.mark.parametrize("scalar", [False, True])
def test_softcap_and_scale(shim, scalar):
    p = problem(CAUSAL, 150, 150, softcap=1.5, scale=0.7, scalar=scalar)
    check(shim, p, with_dlse=True)


@pytest.mark.parametrize("scalar", [False, True])
def test_large_scores_do_not_overflow(shim, scalar):
    p = problem(CAUSAL, 150, 150, scalar=scalar)
    p.q *= 64  # scores of several hundred: the exponential of one would overflow float32
    out, lse = shim.forward(p)
    wanted_out, wanted_lse = forward(p)
    assert np.isfinite(out).all()
    assert np.abs(lse - wanted_lse).max() < 1e-5 * np.abs(wanted_lse).max()
    assert error(out, wanted_out) < 2e-2


@pytest.mark.parametrize("scalar", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_rows_that_see_nothing_are_zero(shim, dtype, scalar):
    """Fully masked rows, empty q, empty k, a gap between segments and the tail behind them."""
    if dtype == "fp32" and not scalar:
        pytest.skip("tensor-core kernels take bf16 and fp16")
    segments = [
        [0, 50, 0, 20, -30, -1],  # causal: the first 30 rows see no key, nor do keys 20 on
        [50, 0, 20, 10, 0, -1],  # empty q
        [50, 7, 30, 0, 0, -1],  # empty k
        [60, 9, 30, 9, 0, -1],  # rows 57 to 59 belong to no segment
        [69, 8, 39, 8, -100, 3],  # a band that misses the rectangle
    ]
    p = problem(segments, 90, 80, dtype, scalar=scalar)
    seen = visible(p.segments, 90, 80)
    assert (seen.sum(1) == 0).sum() > 50
    _, _, (dq, dk, dv) = check(shim, p)
    assert not dq[seen.sum(1) == 0].any()
    assert not dk[seen.sum(0) == 0].any()
    assert not dv[seen.sum(0) == 0].any()


def test_no_rows_at_all(shim):
    p = problem(np.zeros((0, 6)), 0, 0)
    out, lse = shim.forward(p)
    assert out.shape == (0, 2, 64)
    assert lse.shape == (2, 0)
    shim.backward(p, out, out, lse)


def test_one_row_at_the_widest_head(shim):
    check(shim, problem([[0, 1, 0, 2, FULL, -1], [1, 0, 2, 0, 0, -1]], 3, 3, dim=256))


def test_segments_that_share_rows_are_one_softmax(shim):
    """One query range over three key ranges, and a key range seen from two query ranges."""
    shim.configure("random", "random", seed=9)
    segments = [[0, 80, 0, 40, FULL, -1], [0, 80, 60, 50, 3, -1], [20, 30, 40, 20, FULL, -1],
                [80, 20, 0, 40, 10, -1], [0, 80, 0, 40, 5, -1]]  # fmt: skip
    p = problem(segments, 110, 110, heads=(2, 1))
    assert visible(p.segments, 110, 110).max() == 2  # a pair shown twice counts twice
    check(shim, p)


@pytest.mark.parametrize("scalar", [False, True])
def test_merge_equals_one_softmax_over_all_keys(shim, scalar):
    """Ring steps: keys arrive in parts, out and lse run, gradients accumulate."""
    shim.configure("leader", "random", seed=5)
    p = problem([[0, 100, 0, 100, 0, -1], [100, 40, 100, 40, FULL, -1]], 150, 150, scalar=scalar)
    steps = [
        [[0, 100, 0, 30, 0, -1], [100, 40, 100, 40, FULL, -1]],
        [[0, 100, 30, 40, -30, -1]],
        [],
        [[0, 100, 70, 30, -70, -1]],
    ]
    running = (np.zeros(p.q.shape), np.full((2, 150), -np.inf))
    naive_running = running
    for step in steps:
        part = Problem(p.q, p.k, p.v, np.array(step), p.dtype, p.scale, scalar=scalar)
        running = shim.forward(part, running=running)
        naive_running = merge(naive_running, forward(part))
    wanted_out, wanted_lse = forward(p)
    assert np.array_equal(np.isneginf(running[1]), np.isneginf(wanted_lse))
    finite = np.isfinite(wanted_lse)
    assert np.abs(running[1][finite] - wanted_lse[finite]).max() < 1e-5
    assert error(naive_running[0], wanted_out) < 1e-12
    assert error(running[0], wanted_out) < 4e-3  # weights are rounded to bf16 in each step

    dout = random(p.dtype, *p.q.shape)
    start = [RNG.standard_normal(x.shape).astype(np.float32) for x in (p.q, p.k, p.v)]
    grads = start
    for step in steps:
        part = Problem(p.q, p.k, p.v, np.array(step), p.dtype, p.scale, scalar=scalar)
        grads = shim.backward(part, dout, *running, running=grads)
    for found, begun, want in zip(grads, start, backward(p, dout), strict=True):
        assert error(found - begun, want) < 6e-3


def test_merging_leaves_rows_of_no_key_alone(shim):
    p = problem([[0, 10, 0, 10, 0, -1]], 40, 10)
    old = (RNG.standard_normal(p.q.shape).astype(np.float32), np.zeros((2, 40)))
    out, lse = shim.forward(p, running=old)
    assert np.array_equal(out[10:], old[0][10:])
    assert np.array_equal(lse[:, 10:], old[1][:, 10:])
    assert not np.array_equal(out[:10], old[0][:10])


def test_views_of_a_fused_qkv(shim):
    """Row and head strides are the caller's: q, k and v inside one [T, H + 2 Hk, D] tensor."""
    p = problem(PACKED, 200, 200, heads=(4, 2))
    fused = encode(np.concatenate([p.q, p.k, p.v], axis=1), p.dtype)
    found = shim.forward_encoded(p, fused[:, :4], fused[:, 4:6], fused[:, 6:])
    for a, b in zip(found, shim.forward(p), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("scalar", [False, True])
def test_results_do_not_depend_on_schedule_or_packing(shim, scalar):
    p = problem(PACKED, 200, 200, heads=(2, 1), scalar=scalar)
    dout = random("bf16", *p.q.shape)
    found = []
    for schedule, copies, resident in (
        ("lockstep", "late", 1),
        ("random", "random", 3),
        ("laggard", "early", 2),
    ):
        shim.configure(schedule, copies, seed=7, resident=resident)
        out, lse = shim.forward(p, out_dtype="fp32")
        found.append((out, lse, *shim.backward(p, dout, out, lse)))
    alone = Problem(p.q[5:136], p.k[5:136], p.v[5:136], np.array([[0, 131, 0, 131, 0, -1]]),
                    p.dtype, p.scale, scalar=scalar)  # fmt: skip
    out, lse = shim.forward(alone, out_dtype="fp32")
    grads = shim.backward(alone, dout[5:136], out, lse)
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert np.array_equal(a, b)
    for a, b in zip(found[0], (out, lse, *grads), strict=True):
        assert np.array_equal(a[:, 5:136] if a.ndim == 2 else a[5:136], b)


def test_rows_beyond_two_to_the_31_elements(shim):
    """int64 addressing: three rows spread over 5 GiB of untouched memory."""
    stride = (1 << 30) + 64
    # 0x4000 is MAP_NORESERVE, which the mmap module does not name.
    memory = mmap.mmap(-1, (2 * stride + 64) * 2, flags=mmap.MAP_PRIVATE | 0x4000)
    flat = np.frombuffer(memory, np.uint16)
    far = np.lib.stride_tricks.as_strided(flat, (3, 1, 64), (stride * 2, 128, 2), writeable=True)
    p = problem([[0, 3, 0, 3, 0, -1]], 3, 3, heads=(1, 1))
    near = [encode(x, "bf16") for x in (p.q, p.k, p.v)]
    for scalar in (False, True):
        p.scalar = scalar
        wanted = shim.forward_encoded(p, *near)
        for which in range(3):
            far[:] = near[which]
            arrays = [far if i == which else x for i, x in enumerate(near)]
            for a, b in zip(shim.forward_encoded(p, *arrays), wanted, strict=True):
                assert np.array_equal(a, b)
    del far, flat, arrays


def philox(counter, key):
    """Philox4x32-10 of Salmon et al. (2011), on plain integers."""
    c, (k0, k1) = list(counter), key
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k0, b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k1, a & 0xFFFFFFFF]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c


def test_dropout_belongs_to_the_sample(shim):
    rows, heads, probability, key, offset = 40, 2, 0.3, 0x123456789ABCDEF0, 5
    sample = np.repeat(np.array([7, (1 << 33) + 2], np.int64), 20)
    position = np.tile(np.arange(20, dtype=np.int64) + 90, 2)
    p = problem([[0, 20, 0, 20, 0, -1], [20, 20, 20, 20, 0, -1]], rows, rows, "fp64",
                (heads, 1), 24, scalar=True)  # fmt: skip
    p.dropout = (probability, key, offset, sample, position, position)
    keep = np.zeros((heads, rows, rows))
    for h, i, j in np.ndindex(keep.shape):
        s = int(sample[i])
        counter = (int(position[j]) >> 2, int(position[i]), h + offset, s & 0xFFFFFFFF)
        words = philox(counter, (key & 0xFFFFFFFF, (key >> 32) ^ (s >> 32)))
        kept = words[int(position[j]) & 3] >= int(probability * 2**32)
        keep[h, i, j] = kept / (1 - probability)
    out, lse = shim.forward(p)
    wanted_out, wanted_lse = forward(p, keep)
    assert error(out, wanted_out) < 1e-12
    assert error(lse, wanted_lse) < 1e-12
    dout = RNG.standard_normal(out.shape)
    grads = shim.backward(p, dout, out, lse)
    for found, want in zip(grads, backward(p, dout, keep=keep), strict=True):
        assert error(found, want) < 1e-12


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"dtype": "fp32"}, 10001),
        ({"dim": 12}, 10002),
        ({"dim": 264}, 10002),
        ({"segments": [[0, 300, 0, 10, 0, -1]]}, 10004),
        ({"segments": [[0, 10, 195, 10, 0, -1]]}, 10004),
        ({"scale": -1.0}, 10004),
        ({"heads": (3, 2)}, 10004),
    ],
)
def test_what_a_kernel_cannot_do_is_refused(shim, change, code):
    arguments = {"segments": CAUSAL, "rows_q": 200, "rows_k": 200, **change}
    with pytest.raises(ShimError) as refused:
        shim.forward(problem(**arguments))
    assert refused.value.code == code


def test_unaligned_rows_are_refused(shim):
    p = problem(CAUSAL, 200, 200)
    odd = encode(np.zeros((200, 2, 68)), "bf16")[:, :, 2:66]
    with pytest.raises(ShimError) as refused:
        shim.forward_encoded(p, odd, odd, odd)
    assert refused.value.code == 10003
