"""The memory-bound CUDA kernels on a GPU against the CPU ops, at real sizes."""

import pytest
import torch

pytestmark = pytest.mark.gpu
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def same(function, *tensors, tolerance=0.0, **options):
    """Runs `function` on the CPU and on the GPU; all results must agree."""
    there = [x.cuda() if isinstance(x, torch.Tensor) else x for x in tensors]
    wanted, found = function(*tensors, **options), function(*there, **options)
    if isinstance(wanted, torch.Tensor):
        wanted, found = (wanted,), (found,)
    for a, b in zip(found, wanted, strict=True):
        assert a.is_cuda
        torch.testing.assert_close(a.cpu(), b, rtol=tolerance, atol=tolerance)
    return wanted


@pytest.mark.parametrize("degree", [2, 3, 8])
def test_small_and_large_partitions(device, degree):
    from megatron_dcp.ops import relayout

    lengths = torch.randint(0, 200, (300,))
    cu = torch.cumsum(torch.cat([torch.zeros(1, dtype=torch.int64), lengths]), 0)
    total = int(cu[-1]) + 64
    index, _, _ = same(relayout.zigzag_partition, cu, degree, total)
    for x in (torch.randn(total, 4096).bfloat16(), torch.randn(total), torch.arange(total)):
        same(relayout.gather_rows, x, index)
    same(relayout.scatter_rows, torch.randn(total, 33), index, total)
    same(relayout.scatter_rows, torch.randn(total, 33), index // 2, total)
    padded = torch.randn(total, 70).cuda()
    relayout.zero_padding_(padded, cu.cuda())
    assert not padded[int(cu[-1]) :].any()
    assert padded[: int(cu[-1])].all()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tokens", [37, 8192])
def test_small_and_large_head_exchange(device, dtype, tokens):
    from megatron_dcp.ops import relayout

    fused = torch.randn(tokens, 32 + 2 * 4, 128).to(dtype)
    q, k, v = fused[:, :32], fused[:, 32:36], fused[:, 36:]
    for degree in (2, 8):
        (buffer,) = same(relayout.ulysses_pack, q, k, v, degree)
        same(relayout.ulysses_unpack, buffer, 32, 4)
        (split,) = same(relayout.ulysses_split, q, degree)
        same(relayout.ulysses_join, split)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tokens", [19, 4096])
def test_small_and_large_row_arithmetic(device, dtype, tokens):
    from megatron_dcp.ops import rows

    a, b = (torch.randn(tokens, 8, 128).to(dtype) for _ in range(2))
    la, lb = (20 * torch.randn(8, tokens) for _ in range(2))
    la[:, 3] = lb[:, 3] = lb[:, 7] = float("-inf")
    same(rows.merge_lse, a, la, b, lb, tolerance=TOLERANCE[dtype])
    positions = torch.randint(0, 1 << 20, (tokens,))
    same(rows.rope, a, positions, rows.rope_frequencies(96), tolerance=TOLERANCE[dtype])
    logits = torch.randn(tokens, 5003).to(dtype)
    labels = torch.randint(-1, 5003, (tokens,))
    weights = torch.rand(tokens)

    def loss_and_grad(logits, labels, weights):
        leaf = logits.clone().requires_grad_()
        loss, lse = rows.cross_entropy(leaf, labels, weights)
        (loss + lse.sum() * 1e-3).backward()
        return loss.detach(), lse.detach(), leaf.grad

    same(loss_and_grad, logits, labels, weights, tolerance=1e-3)
