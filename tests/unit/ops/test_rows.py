"""lse merge, RoPE and cross-entropy against torch in float64."""

from __future__ import annotations

import pytest
import torch

from megatron_dcp import ops
from megatron_dcp.ops.reference import (
    cross_entropy_reference,
    merge_lse_reference,
    rope_reference,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# Twice the spacing of numbers near 1 in each type.
TOLERANCE = {
    torch.float64: 1e-14,
    torch.float32: 1e-6,
    torch.bfloat16: 1.6e-2,
    torch.float16: 2e-3,
}


def parts(dtype=torch.float64):
    out_a, out_b = (torch.randn(6, 3, 8, dtype=torch.float64).to(dtype) for _ in range(2))
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    lse_a, lse_b = (torch.randn(3, 6, dtype=acc) * 5 for _ in range(2))
    return out_a, lse_a, out_b, lse_b


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merge_equals_the_reference(dtype):
    inputs = parts(dtype)
    out, lse = ops.merge_lse(*inputs)
    want_out, want_lse = merge_lse_reference(*(x.double() for x in inputs))
    assert out.dtype == dtype
    assert (out - want_out).abs().max() <= TOLERANCE[dtype] * want_out.abs().max()
    assert (lse - want_lse).abs().max() <= 1e-5


def test_merge_of_two_empty_parts_is_zero():
    out_a, lse_a, out_b, lse_b = parts()
    out_a[2], out_b[2] = float("nan"), float("inf")  # what uninitialised memory may hold
    lse_a[:, 2] = lse_b[:, 2] = float("-inf")
    lse_b[:, 4] = float("-inf")
    out_b[4] = float("nan")
    out, lse = ops.merge_lse(out_a, lse_a, out_b, lse_b)
    assert out[2].abs().max() == 0
    assert torch.isneginf(lse[:, 2]).all()
    assert torch.equal(out[4], out_a[4])
    assert torch.equal(lse[:, 4], lse_a[:, 4])


def test_merge_with_nan_is_not_taken_for_empty():
    out_a, lse_a, out_b, lse_b = parts()
    lse_a[:, 1], lse_b[:, 1] = float("nan"), float("-inf")
    lse_a[:, 3], lse_b[:, 3] = float("-inf"), float("nan")
    out, lse = ops.merge_lse(out_a, lse_a, out_b, lse_b)
    assert out[[1, 3]].isnan().all()
    assert lse[:, [1, 3]].isnan().all()
    assert torch.isfinite(out[[0, 2, 4, 5]]).all()


def test_merge_does_not_overflow_exp():
    out_a, lse_a, out_b, lse_b = parts(torch.float32)
    out, lse = ops.merge_lse(out_a, lse_a + 1e4, out_b, lse_b - 1e4)
    assert torch.equal(out, out_a)
    assert torch.equal(lse, lse_a + 1e4)


def test_merge_gradients():
    inputs = [x.requires_grad_() for x in parts()]
    assert torch.autograd.gradcheck(ops.merge_lse, inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [16, 10])
def test_rope_equals_the_reference(dtype, interleaved, rotated):
    x = torch.randn(7, 3, 16, dtype=torch.float64).to(dtype)
    positions = torch.tensor([0, 5, 1, 100000, 3, 2, 9])
    frequencies = ops.rope_frequencies(rotated)
    got = ops.rope(x, positions, frequencies, scale=1.2, interleaved=interleaved)
    want = rope_reference(x.double(), positions, frequencies, 1.2, interleaved)
    assert got.dtype == dtype
    assert (got - want).abs().max() <= TOLERANCE[dtype] * want.abs().max()
    assert torch.equal(got[..., rotated:], x[..., rotated:])


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_gradients(interleaved):
    x = torch.randn(4, 2, 8, dtype=torch.float64, requires_grad=True)
    positions, f = torch.tensor([3, 0, 7, 7]), ops.rope_frequencies(6)
    assert torch.autograd.gradcheck(
        lambda t: ops.rope(t, positions, f, scale=1.3, interleaved=interleaved), (x,)
    )


def test_rope_depends_on_positions_not_on_order():
    x = torch.randn(10, 2, 8)
    index = torch.randperm(10)
    f = ops.rope_frequencies(8)
    whole = ops.rope(x, torch.arange(10), f)
    assert torch.equal(ops.rope(x[index], index, f), whole[index])


def test_scaled_frequencies():
    plain = ops.rope_frequencies(64)
    assert plain[0] == 1.0
    ntk = ops.ntk_frequencies(64, 4.0)
    assert ntk[0] == 1.0
    torch.testing.assert_close(ntk[-1] * 4.0, plain[-1], rtol=1e-12, atol=0)
    yarn, scale = ops.yarn_frequencies(64, 4.0, 4096)
    torch.testing.assert_close(yarn[0], plain[0])
    torch.testing.assert_close(yarn[-1] * 4.0, plain[-1])
    assert ((yarn <= plain + 1e-15) & (yarn >= plain / 4.0 - 1e-15)).all()
    assert scale == pytest.approx(1.1386294361)
    with pytest.raises(ValueError, match="even"):
        ops.rope_frequencies(7)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [7, 5000])
def test_cross_entropy_equals_the_reference(dtype, vocab):
    logits = (torch.randn(9, vocab, dtype=torch.float64) * 4).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab, (9,))
    labels[[2, 5]] = -100
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    weights = torch.rand(9, dtype=acc)
    weights[3] = 0
    loss, lse = ops.cross_entropy(logits, labels, weights)
    loss.backward()
    exact = logits.detach().double().requires_grad_()
    want = cross_entropy_reference(exact, labels, weights.double())
    want.backward()
    assert loss.dtype == lse.dtype == acc
    bound = 1e-12 if acc == torch.float64 else 2e-6
    assert abs(loss.item() - want.item()) <= bound * want.item()
    torch.testing.assert_close(
        lse.double(), torch.logsumexp(exact.detach(), 1), rtol=1e-6, atol=1e-6
    )
    assert (logits.grad - exact.grad).abs().max() <= TOLERANCE[dtype] * exact.grad.abs().max()
    assert logits.grad[[2, 3, 5]].abs().max() == 0


def test_cross_entropy_gradients_also_through_lse():
    logits = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([1, -1, 5, 0])
    weights = torch.tensor([1.0, 1.0, 0.5, 2.0], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: ops.cross_entropy(x, labels, weights), (logits,))
    assert torch.autograd.gradcheck(lambda x: ops.cross_entropy(x, labels), (logits,))


def test_cross_entropy_of_extreme_logits():
    logits = torch.tensor([[1e4, -1e4, 0.0], [float("-inf"), 2.0, 1.0]])
    loss, lse = ops.cross_entropy(logits, torch.tensor([0, 1]))
    torch.testing.assert_close(loss, torch.tensor(0.3132617), rtol=1e-5, atol=0)
    assert torch.isfinite(lse).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cross_entropy_of_nan_is_nan(dtype):
    """Also where a chunk of the vocabulary holds nothing else (padded vocabularies are -inf)."""
    logits = torch.randn(2, 5000).to(dtype)
    logits[0, :2048] = float("-inf")
    logits[0, 17] = float("nan")
    loss, lse = ops.cross_entropy(logits, torch.tensor([3000, 3000]))
    assert loss.isnan()
    assert lse.isnan().tolist() == [True, False]


def test_cross_entropy_refuses_what_it_cannot_do():
    logits = torch.randn(2, 3)
    with pytest.raises(RuntimeError, match="label 3 of token 1"):
        ops.cross_entropy(logits, torch.tensor([0, 3]))
    with pytest.raises(ValueError, match="no gradient for its weights"):
        ops.cross_entropy(logits, torch.tensor([0, 1]), torch.ones(2, requires_grad=True))
