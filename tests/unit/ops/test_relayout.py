"""Zigzag partition, row moves, Ulysses buffers, padding: against plain indexing."""

from __future__ import annotations

import pytest
import torch

from megatron_dcp import ops
from megatron_dcp.ops.reference import zigzag_reference


def cu(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


@pytest.mark.parametrize("degree", [1, 2, 3, 4, 8])
def test_zigzag_cuts_at_floor_without_padding(degree):
    lengths = [7, 1, 130, 0, 513, 3, 64]
    index, positions, cu_rank = ops.zigzag_partition(cu(lengths), degree)
    starts = cu(lengths).tolist()
    want = zigzag_reference(lengths, degree)
    assert index.tolist() == [starts[s] + p for held in want for s, p in held]
    assert positions.tolist() == [p for held in want for _, p in held]
    assert sorted(index.tolist()) == list(range(sum(lengths)))
    for rank, held in enumerate(want):
        counts = [sum(1 for s, _ in held if s == b) for b in range(len(lengths))]
        assert cu_rank[rank].diff().tolist() == counts


def test_zigzag_balances_causal_work():
    index, positions, cu_rank = ops.zigzag_partition(cu([1000, 517]), 4)
    del index
    work = [float(p.add(1).sum()) for p in positions.split(cu_rank[:, -1].tolist())]
    assert max(work) / (sum(work) / 4) < 1.02


def test_zigzag_marks_places_after_the_last_token():
    index, _, _ = ops.zigzag_partition(cu([3, 2]), 2, total=8)
    assert index[5:].tolist() == [-1, -1, -1]
    with pytest.raises(RuntimeError, match=r"1-D and start at 0; got int64 \[2, 2\]"):
        ops.zigzag_partition(torch.tensor([[0, 1], [3, 4]]), 2, 4)
    with pytest.raises(RuntimeError, match=r"start at 0; .* from 1"):
        ops.zigzag_partition(torch.tensor([1, 4]), 2, 4)
    with pytest.raises(RuntimeError, match="beyond the total of 4"):
        ops.zigzag_partition(cu([3, 2]), 2, total=4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_gather_then_scatter_is_the_inverse(dtype):
    x = torch.arange(12 * 5).reshape(12, 5).to(dtype)
    index, _, _ = ops.zigzag_partition(cu([7, 5]), 3)
    moved = ops.gather_rows(x, index)
    assert torch.equal(moved, x[index])
    if dtype != torch.int64:
        assert torch.equal(ops.scatter_rows(moved, index, 12), x)


def test_gather_and_scatter_are_adjoint():
    x = torch.randn(6, 2, 3, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([5, 0, -1, 0, 2])
    assert torch.autograd.gradcheck(lambda t: ops.gather_rows(t, index), (x,))
    y = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: ops.scatter_rows(t, index, 6), (y,))
    assert ops.gather_rows(x, index)[2].abs().max() == 0
    with pytest.raises(RuntimeError, match="index 0 is 6"):
        ops.gather_rows(x, torch.tensor([6]))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "degree"), [(8, 4, 2), (8, 2, 4), (8, 2, 8), (6, 3, 1)]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_ulysses_pack_holds_the_heads_of_each_destination(heads, kv_heads, degree, dtype):
    q, k, v = (torch.randn(5, h, 8).to(dtype) for h in (heads, kv_heads, kv_heads))
    buffer = ops.ulysses_pack(q, k, v, degree)
    h, kv = heads // degree, max(1, kv_heads // degree)
    group = heads // kv_heads
    for rank in range(degree):
        mine = range(rank * h, (rank + 1) * h)
        kv_mine = sorted({j // group for j in mine})
        assert len(kv_mine) == kv
        assert torch.equal(buffer[rank, :, :h], q[:, list(mine)])
        assert torch.equal(buffer[rank, :, h : h + kv], k[:, kv_mine])
        assert torch.equal(buffer[rank, :, h + kv :], v[:, kv_mine])
    back = ops.ulysses_unpack(buffer, heads, kv_heads)
    copies = max(1, degree // kv_heads)
    for a, b, n in zip(back, (q, k, v), (1, copies, copies), strict=True):
        assert torch.equal(a, b * n)


def test_ulysses_ops_have_their_gradients():
    q, k, v = (torch.randn(3, h, 4, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2))
    assert torch.autograd.gradcheck(lambda *t: ops.ulysses_pack(*t, 4), (q, k, v))
    b = torch.randn(4, 3, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: ops.ulysses_unpack(t, 4, 2), (b,))
    assert torch.autograd.gradcheck(ops.ulysses_join, (b,))
    assert torch.autograd.gradcheck(lambda t: ops.ulysses_split(t, 2), (q,))


def test_ulysses_join_is_the_inverse_of_split():
    x = torch.randn(5, 6, 8).transpose(0, 1).contiguous().transpose(0, 1)
    parts = ops.ulysses_split(x, 3)
    assert torch.equal(parts[1], x[:, 2:4])
    assert torch.equal(ops.ulysses_join(parts), x)


@pytest.mark.parametrize(("heads", "kv_heads", "degree"), [(6, 2, 4), (8, 3, 2), (8, 4, 6)])
def test_ulysses_refuses_degrees_that_do_not_divide(heads, kv_heads, degree):
    q, k = torch.randn(2, heads, 8), torch.randn(2, kv_heads, 8)
    with pytest.raises(RuntimeError, match="Ulysses needs a degree"):
        ops.ulysses_pack(q, k, k, degree)


def test_zero_fill_of_padding_rows():
    x = torch.full((5, 2), float("nan"))
    x[:3] = 1.0
    assert ops.zero_padding_(x, cu([2, 1])) is x
    assert x.tolist() == [[1.0, 1.0]] * 3 + [[0.0, 0.0]] * 2
