"""varlen and segment attention against the dense references, and the rules they must keep.

Every rule of the op contract that came from somebody's bug has a test of its name here.
"""

from __future__ import annotations

import pytest
import torch

from megatron_dcp import ops
from megatron_dcp.ops.reference import (
    dropout_factors,
    segment_attention_reference,
    varlen_attention_reference,
)
from megatron_dcp.ops.segments import band_segment, full_segment, packed_segments, segment_tensor

LENGTHS = [7, 1, 33, 0, 64, 3]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6}


def make(total_q, total_k, heads=4, kv_heads=2, dim=16, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = [(total_q, heads, dim), (total_k, kv_heads, dim), (total_k, kv_heads, dim)]
    return [torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in shapes]


def cu(lengths, dtype=torch.int32):
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def grads(fn, tensors, seed=1, through_lse=True):
    """Gradients of a random linear function of (out, lse restricted to live rows)."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out, lse = fn(*leaves)
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(out.shape, generator=g, dtype=torch.float64).to(out.dtype)
    loss = (out * weight).sum()
    if through_lse:
        dlse = torch.randn(lse.shape, generator=g, dtype=torch.float64).to(lse.dtype)
        loss = loss + torch.where(torch.isfinite(lse), lse * dlse, 0.0).sum()
    loss.backward()
    return [out.detach(), lse.detach(), *(leaf.grad for leaf in leaves)]


def check(fn, reference, tensors, tolerance=None, through_lse=True):
    got = grads(fn, tensors, through_lse=through_lse)
    want = grads(reference, [t.double() for t in tensors], through_lse=through_lse)
    tolerance = tolerance or TOLERANCE[tensors[0].dtype]
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
        assert torch.isfinite(a).all() or name == "lse", name
        assert torch.equal(torch.isinf(a), torch.isinf(b)), name
        live = ~torch.isinf(b)
        scale = b[live].abs().max().clamp_min(1e-30) if live.any() else 1.0
        error = ((a.double() - b)[live].abs() / scale).max() if live.any() else 0.0
        assert error <= tolerance, (name, float(error))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False},
        {"window_size": (5, 0)},
        {"causal": False, "window_size": (4, 2)},
        {"causal": False, "window_size": (-1, 3)},
        {"causal": False, "window_size": (3, -1)},
        {"softcap": 3.0},
        {"softmax_scale": 0.7},
    ],
    ids=str,
)
def test_varlen_equals_the_reference(dtype, options):
    tensors = make(sum(LENGTHS), sum(LENGTHS), dtype=dtype)
    c = cu(LENGTHS)
    check(
        lambda q, k, v: ops.varlen_attention(q, k, v, c, c, **options),
        lambda q, k, v: varlen_attention_reference(q, k, v, c, c, **options),
        tensors,
    )


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1), (6, 2)])
@pytest.mark.parametrize("dim", [8, 24, 64, 72, 128, 256])
def test_heads_and_dims(heads, kv_heads, dim):
    tensors = make(41, 41, heads, kv_heads, dim, dtype=torch.float32)
    c = cu([30, 11])
    check(
        lambda q, k, v: ops.varlen_attention(q, k, v, c, c),
        lambda q, k, v: varlen_attention_reference(q, k, v, c, c),
        tensors,
    )


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_causal_is_aligned_to_the_bottom_right(index):
    q_lengths, k_lengths = [3, 5, 8], [9, 5, 2]
    tensors = make(sum(q_lengths), sum(k_lengths))
    a, b = cu(q_lengths, index), cu(k_lengths, index)
    check(
        lambda q, k, v: ops.varlen_attention(q, k, v, a, b),
        lambda q, k, v: varlen_attention_reference(q, k, v, a, b),
        tensors,
    )


def test_tail_rows_beyond_the_last_sequence_are_zeroed():
    q, k, v = make(20, 24)
    c = cu([9, 4])
    got = grads(lambda *t: ops.varlen_attention(*t, c, c), [q, k, v], through_lse=False)
    out, lse, dq, dk, dv = got
    assert out[13:].abs().max() == 0
    assert torch.isneginf(lse[:, 13:]).all()
    for g in (dq, dk, dv):
        assert g[13:].abs().max() == 0
        assert g[:13].abs().max() > 0


def test_causal_rows_without_keys_are_zero_and_have_zero_gradients():
    q, k, v = make(8, 3)
    a, b = cu([8]), cu([3])
    out, lse, dq, dk, dv = grads(lambda *t: ops.varlen_attention(*t, a, b), [q, k, v])
    assert out[:5].abs().max() == 0
    assert torch.isneginf(lse[:, :5]).all()
    assert dq[:5].abs().max() == 0
    assert all(torch.isfinite(g).all() for g in (dq, dk, dv))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_empty_q_with_dim_256_and_max_seqlen_1(dtype):
    q, k, v = (t.requires_grad_() for t in make(0, 5, 2, 1, 256, dtype=dtype))
    out, lse = ops.varlen_attention(q, k, v, cu([0]), cu([5]), 1, 1)
    out.sum().backward()
    assert out.shape == (0, 2, 256)
    assert lse.shape == (2, 0)
    assert k.grad is not None
    assert k.grad.abs().max() == 0


def test_no_sequences_and_no_keys():
    q, k, v = make(4, 0)
    out, lse = ops.varlen_attention(q, k, v, cu([4]), cu([0]))
    assert out.abs().max() == 0
    assert torch.isneginf(lse).all()
    out, _ = ops.varlen_attention(q, k, v, cu([]), cu([]))
    assert out.abs().max() == 0


def test_gradients_flow_through_lse_alone():
    tensors = make(12, 12)
    c = cu([12])
    leaves = [t.requires_grad_() for t in tensors]
    _, lse = ops.varlen_attention(*leaves, c, c)
    lse.sum().backward()
    got = [leaf.grad.clone() for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    _, lse = varlen_attention_reference(*leaves, c, c)
    lse.sum().backward()
    for a, leaf in zip(got[:2], leaves[:2], strict=True):
        torch.testing.assert_close(a, leaf.grad, rtol=1e-12, atol=1e-12)
    assert got[2].abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_lse_is_the_natural_log_in_the_accumulation_type(dtype):
    q, k, v = make(6, 6, dtype=dtype)
    out, lse = ops.varlen_attention(q, k, v, cu([6]), cu([6]))
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert lse.shape == (4, 6)
    first = (q[0].double() * k[0].double().repeat_interleave(2, 0)).sum(-1) / 4.0
    torch.testing.assert_close(lse[:, 0].double(), first, rtol=1e-5, atol=1e-5)


def test_strided_inputs_need_no_copy():
    fused = torch.randn(10, 4, 3, 16, dtype=torch.float64)
    q, k, v = fused.unbind(2)
    c = cu([6, 4])
    a = ops.varlen_attention(q, k, v, c, c)
    b = ops.varlen_attention(q.contiguous(), k.contiguous(), v.contiguous(), c, c)
    assert torch.equal(a[0], b[0])
    assert torch.equal(a[1], b[1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_segments_sharing_rows_are_one_softmax(dtype):
    tensors = make(40, 50, dtype=dtype)
    segments = segment_tensor(
        [
            full_segment(5, 20, 0, 11),
            band_segment(10, 25, 20, 22, q_position=12, k_position=4),
            band_segment(0, 18, 11, 30, q_position=30, k_position=0, left=9),
            full_segment(38, 2, 49, 1),
            full_segment(3, 0, 3, 5),
        ]
    )
    check(
        lambda q, k, v: ops.segment_attention(q, k, v, segments),
        lambda q, k, v: segment_attention_reference(q, k, v, segments),
        tensors,
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_merging_in_place_equals_one_call(dtype):
    q, k, v = make(30, 30, dtype=dtype)
    # A ring of 3 over one causal sequence: the diagonal first, then what lies left of it.
    pieces = [(0, 11), (11, 9), (20, 10)]
    steps = [
        segment_tensor(
            [
                band_segment(qs, ql, ks, kl, q_position=qs, k_position=ks)
                for i, (qs, ql) in enumerate(pieces)
                for ks, kl in [pieces[(i - step) % 3]]
            ]
        )
        for step in range(3)
    ]
    out, lse = ops.new_accumulators(q)
    for segments in steps:
        ops.segment_attention_forward(q, k, v, segments, out, lse)
    want_out, want_lse, *want = grads(
        lambda *t: varlen_attention_reference(*t, cu([30]), cu([30])),
        [x.double() for x in (q, k, v)],
        through_lse=False,
    )
    tolerance = TOLERANCE[dtype]
    assert (out - want_out).abs().max() <= tolerance * 10
    assert (lse - want_lse).abs().max() <= tolerance * 10

    g = torch.Generator().manual_seed(1)
    dout = torch.randn(out.shape, generator=g, dtype=torch.float64).to(dtype)
    got = [torch.zeros_like(x, dtype=out.dtype) for x in (q, k, v)]
    for segments in steps:
        ops.segment_attention_backward(dout, q, k, v, out, lse, segments, *got)
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() <= tolerance * 10


def test_merging_leaves_rows_outside_the_segments_alone():
    q, k, v = make(10, 10)
    out, lse = torch.full((10, 4, 16), 3.0, dtype=q.dtype), torch.full((4, 10), 0.5, dtype=q.dtype)
    ops.segment_attention_forward(q, k, v, segment_tensor([full_segment(2, 3, 0, 4)]), out, lse)
    untouched = [0, 1, 5, 6, 7, 8, 9]
    assert (out[untouched] == 3.0).all()
    assert (lse[:, untouched] == 0.5).all()
    assert (out[2:5] != 3.0).all()


def test_merging_nothing_into_nothing_stays_empty():
    q, k, v = make(6, 6)
    out, lse = ops.new_accumulators(q)
    hidden = segment_tensor([(0, 6, 0, 6, -10, -1)])
    ops.segment_attention_forward(q, k, v, hidden, out, lse)
    assert out.abs().max() == 0
    assert torch.isneginf(lse).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_dropout_belongs_to_the_sample_not_to_the_layout(dtype):
    q, k, v = make(24, 24, dtype=dtype)
    ids = torch.tensor([5] * 14 + [(1 << 33) + 9] * 10)
    positions = torch.cat([torch.arange(14), torch.arange(10)])
    c = cu([14, 10])
    key = ops.make_rng_key(7, 3, 11)
    drop = {"dropout_p": 0.3, "rng_key": key, "sample_ids": ids, "head_offset": 2}
    factors = dropout_factors(0.3, key, ids, positions, positions, 4, 2)
    live = factors[:, :14, :14]
    assert 0.6 < (live > 0).double().mean() < 0.8
    check(
        lambda *t: ops.varlen_attention(
            *t, c, c, q_positions=positions, k_positions=positions, **drop
        ),
        lambda *t: varlen_attention_reference(*t, c, c, dropout=factors),
        [q, k, v],
    )
    # The second sample alone, as another rank would hold it, gives the same rows.
    whole, _ = ops.varlen_attention(
        q, k, v, c, c, q_positions=positions, k_positions=positions, **drop
    )
    alone, _ = ops.varlen_attention(
        q[14:],
        k[14:],
        v[14:],
        cu([10]),
        cu([10]),
        q_positions=positions[14:],
        k_positions=positions[14:],
        **(drop | {"sample_ids": ids[14:]}),
    )
    assert torch.equal(whole[14:], alone)


def test_dropout_without_positions_is_refused():
    q, k, v = make(4, 4)
    with pytest.raises(RuntimeError, match="sample_ids, q_positions and k_positions"):
        ops.varlen_attention(q, k, v, cu([4]), cu([4]), dropout_p=0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a | {"k": a["k"].float()}, "one dtype; got float64 .*float32"),
        (lambda a: a | {"v": a["v"][:-1]}, "k and v must be"),
        (lambda a: a | {"k": a["k"][:, :1].repeat(1, 3, 1)}, "k and v must be"),
        (lambda a: a | {"cu_seqlens_q": cu([3, 1])}, "one element more"),
        (lambda a: a | {"cu_seqlens_q": torch.tensor([0, 9])}, "leaves q"),
        (lambda a: a | {"cu_seqlens_q": torch.tensor([1, 4])}, r"start at 0; .* 1 \(q\)"),
        (lambda a: a | {"cu_seqlens_q": torch.tensor([[0, 4]])}, "1-D"),
        (lambda a: a | {"cu_seqlens_k": torch.tensor([[0, 4]])}, r"1-D .* int64 \[1, 2\]"),
        (lambda a: a | {"cu_seqlens_k": torch.tensor([0.0, 4.0])}, "int64; got float32"),
        (lambda a: a | {"window_size": (-2, 0)}, r"no limit.*got \(-2, 0\)"),
        (
            lambda a: (
                a
                | {"dropout_p": 0.1, "sample_ids": torch.zeros(4, dtype=torch.int32)}
                | {"q_positions": torch.arange(4), "k_positions": torch.arange(4)}
            ),
            r"sample_ids must be .* int64 .*got int32 \[4\]",
        ),
        (lambda a: a | {"softcap": -1.0}, "softcap"),
        (lambda a: a | {"q": a["q"].long()}, "float64, float32"),
    ],
)
def test_bad_arguments_are_refused_with_the_reason(change, message):
    q, k, v = make(4, 4)
    args = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu([4]), "cu_seqlens_k": cu([4])}
    with pytest.raises(RuntimeError, match=message):
        ops.varlen_attention(**change(args))


def test_gradcheck_of_the_ops_in_float64():
    q, k, v = (t.requires_grad_() for t in make(9, 9, 2, 1, 8))
    c = cu([5, 3])
    segments = packed_segments([5, 3], [5, 3])

    def run(fn):
        def inner(q, k, v):
            out, lse = fn(q, k, v)
            return out, torch.where(torch.isfinite(lse), lse, 0.0)

        return inner

    assert torch.autograd.gradcheck(run(lambda *t: ops.varlen_attention(*t, c, c)), (q, k, v))
    assert torch.autograd.gradcheck(
        run(lambda *t: ops.segment_attention(*t, segments, softcap=2.0)), (q, k, v)
    )


def test_gradcheck_of_the_reference_in_float64():
    q, k, v = (t.requires_grad_() for t in make(7, 7, 2, 1, 8))
    c = cu([4, 2])

    def run(q, k, v):
        out, lse = varlen_attention_reference(q, k, v, c, c, softcap=2.0, window_size=(2, 0))
        return out, torch.where(torch.isfinite(lse), lse, 0.0)

    assert torch.autograd.gradcheck(run, (q, k, v))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_addresses_are_64_bits_wide(dtype):
    """Row stride times row passes 2^31 elements; only two rows of the storage are ever touched."""
    stride = (1 << 31) + 8
    try:
        storage = torch.empty(stride + 16, dtype=dtype)
    except RuntimeError:
        pytest.skip("no address space for a storage of 2^31 elements")
    rows = torch.as_strided(storage, (2, 1, 16), (stride, 16, 1))
    near = make(2, 2, 1, 1, 16, dtype)[0]
    rows.copy_(near)
    far = grads(lambda *t: ops.varlen_attention(*t, cu([2]), cu([2])), [near, near, near])
    got, lse = ops.varlen_attention(rows, rows, rows, cu([2]), cu([2]))
    assert torch.equal(got, far[0])
    assert torch.equal(lse, far[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_partial_results_are_float32(dtype):
    q, k, v = make(8, 8, dtype=dtype)
    segments = segment_tensor([full_segment(0, 8, 0, 8)])
    out, lse = ops.new_accumulators(q)
    assert out.dtype == lse.dtype == torch.float32
    with pytest.raises(RuntimeError, match="out must be float32"):
        ops.segment_attention_forward(q, k, v, segments, out.to(dtype), lse)
    ops.segment_attention_forward(q, k, v, segments, out, lse)
    sums = [torch.zeros_like(x) for x in (q, k, v)]
    with pytest.raises(RuntimeError, match="dq must be float32"):
        ops.segment_attention_backward(out.to(dtype), q, k, v, out, lse, segments, *sums)


FAR = (1 << 63) - 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("far", "near"),
    [
        ((FAR, -1), (12, -1)),
        ((FAR, FAR), (12, 12)),
        ((1 << 40, (1 << 40) + 2), (12, 14)),
        ((3, FAR), (3, -1)),
        ((-FAR - 1, FAR), (-9, -1)),
        ((FAR, 1 << 40), (-9, -1)),
    ],
    ids=str,
)
def test_bounds_of_the_band_may_be_any_integer(dtype, far, near):
    """A whole rectangle is often written with INT64_MAX; rows are added to the bounds."""
    tensors = make(9, 12, dtype=dtype)
    a, b = (segment_tensor([(1, 8, 0, 12, *band)]) for band in (far, near))
    got = grads(lambda *t: ops.segment_attention(*t, a), tensors)
    want = grads(lambda *t: ops.segment_attention(*t, b), tensors)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def test_autograd_notices_accumulators_that_were_written():
    """What a graph has saved of them must not change under it unseen."""
    q, k, v = make(4, 4)
    segments = segment_tensor([full_segment(0, 4, 0, 4)])
    scale = torch.ones(q.shape, dtype=q.dtype, requires_grad=True)
    out, lse = ops.new_accumulators(q)
    kept = scale * out
    ops.segment_attention_forward(q, k, v, segments, out, lse)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.sum().backward()
    sums = [torch.zeros_like(x) for x in (q, k, v)]
    kept = sum((scale[:, : x.shape[1]] * x).sum() for x in sums)
    ops.segment_attention_backward(out, q, k, v, out, lse, segments, *sums)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()


def test_many_small_merges_do_not_drift():
    """A ring of 16 steps in bfloat16 is as close to float64 as one call is.

    But for the merges: each rounds the float32 output once more, 2^-24 of it at most. That shows
    where weights are not rounded to bfloat16 either (paths without its instructions).
    """
    q, k, v = make(64, 64, 2, 1, 32, torch.bfloat16)
    want, _ = varlen_attention_reference(
        q.double(), k.double(), v.double(), cu([64]), cu([64]), causal=False
    )
    out, lse = ops.new_accumulators(q)
    for step in range(16):
        part = segment_tensor([full_segment(0, 64, 4 * step, 4)])
        ops.segment_attention_forward(q, k, v, part, out, lse)
    once, once_lse = ops.new_accumulators(q)
    ops.segment_attention_forward(
        q, k, v, segment_tensor([full_segment(0, 64, 0, 64)]), once, once_lse
    )
    merges = 16 * 2.0**-24 * want.abs().max()
    assert (out - want).abs().max() <= 1.5 * (once - want).abs().max() + merges
