"""torch.compile with fullgraph: the ops trace through their fakes, forward and backward."""

from __future__ import annotations

import pytest
import torch

from megatron_dcp import ops
from megatron_dcp.ops.segments import full_segment, segment_tensor

LENGTHS = [5, 9, 2]


def inputs():
    g = torch.Generator().manual_seed(0)
    return [torch.randn(16, h, 8, generator=g, requires_grad=True) for h in (4, 2, 2)]


def model(q, k, v, cu, positions, frequencies, index, labels):
    """Every differentiable op in one graph."""
    q, k = (ops.rope(x, positions, frequencies) for x in (q, k))
    out, lse = ops.varlen_attention(q, k, v, cu, cu, window_size=(4, 0))
    segments = segment_tensor([full_segment(0, 16, 3, 7)])
    other, other_lse = ops.segment_attention(q, k, v, segments)
    out, lse = ops.merge_lse(out, lse, other, other_lse)
    buffer = ops.ulysses_pack(out, k, v, 2)
    out = ops.ulysses_join(buffer[:, :, :2].contiguous())
    logits = ops.gather_rows(out.flatten(1), index)
    loss, _ = ops.cross_entropy(logits, labels)
    return loss + lse.sum()


@pytest.mark.parametrize("dynamic", [False, True])
def test_fullgraph_forward_and_backward(dynamic):
    torch._dynamo.reset()
    cu = torch.tensor([0, *LENGTHS]).cumsum(0)
    rest = (
        cu,
        torch.arange(16),
        ops.rope_frequencies(8),
        torch.randperm(16),
        torch.randint(0, 32, (16,)),
    )
    eager, compiled = inputs(), inputs()
    want = model(*eager, *rest)
    want.backward()
    got = torch.compile(model, fullgraph=True, dynamic=dynamic, backend="aot_eager")(
        *compiled, *rest
    )
    got.backward()
    torch.testing.assert_close(got, want)
    for a, b in zip(compiled, eager, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.nightly
def test_fullgraph_with_inductor():
    torch._dynamo.reset()
    cu = torch.tensor([0, *LENGTHS]).cumsum(0)

    def run(q, k, v):
        out, lse = ops.varlen_attention(q * 2, k, v, cu, cu)
        return out.sin().sum() + lse.sum()

    eager, compiled = inputs(), inputs()
    run(*eager).backward()
    torch.compile(run, fullgraph=True)(*compiled).backward()
    for a, b in zip(compiled, eager, strict=True):
        torch.testing.assert_close(a.grad, b.grad)
