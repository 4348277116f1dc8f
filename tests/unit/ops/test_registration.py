"""Every op of the namespace passes `torch.library.opcheck`; a missing build says what to do."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from megatron_dcp import ops
from megatron_dcp.ops.segments import packed_segments

LENGTHS = [5, 0, 3]
TESTS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


def attention_inputs(requires_grad):
    q, k, v = (torch.randn(9, h, 8, requires_grad=requires_grad) for h in (4, 2, 2))
    return q, k, v, torch.tensor([0, *LENGTHS]).cumsum(0), packed_segments(LENGTHS, LENGTHS)


def results(q, k, v, cu):
    with torch.no_grad():
        out, lse = ops.varlen_attention(q, k, v, cu, cu)
    return torch.randn_like(out), q, k, v, out, lse


def varlen():
    q, k, v, cu, _ = attention_inputs(True)
    return (q, k, v, cu, cu), {"softcap": 2.0}


def segment():
    q, k, v, _, segments = attention_inputs(True)
    return (q, k, v, segments), {}


def varlen_grad():
    q, k, v, cu, _ = attention_inputs(False)
    return (*results(q, k, v, cu), cu, cu), {}


def segment_grad():
    q, k, v, cu, segments = attention_inputs(False)
    return (*results(q, k, v, cu), segments), {}


def segment_forward():
    q, k, v, _, segments = attention_inputs(False)
    return (q, k, v, segments, *ops.new_accumulators(q)), {"softmax_scale": 0.4}


def segment_backward():
    q, k, v, cu, segments = attention_inputs(False)
    sums = [torch.zeros_like(x) for x in (q, k, v)]
    return (*results(q, k, v, cu), segments, *sums), {"softmax_scale": 0.4}


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def merge_inputs(requires_grad):
    shapes = [(5, 2, 8), (2, 5), (5, 2, 8), (2, 5)]
    return tuple(torch.randn(s, requires_grad=requires_grad) for s in shapes)


LABELS = torch.tensor([3, -1, 0])

SAMPLES = {
    "varlen_attention": varlen,
    "varlen_attention_grad": varlen_grad,
    "segment_attention": segment,
    "segment_attention_grad": segment_grad,
    "segment_attention_forward": segment_forward,
    "segment_attention_backward": segment_backward,
    "zigzag_partition": lambda: ((torch.tensor([0, 5, 9]), 2, 11), {}),
    "gather_rows": lambda: ((leaf(6, 3), torch.tensor([4, -1, 0])), {}),
    "scatter_rows": lambda: ((leaf(3, 4), torch.tensor([4, -1, 0]), 6), {}),
    "ulysses_pack": lambda: ((leaf(5, 4, 8), leaf(5, 2, 8), leaf(5, 2, 8), 4), {}),
    "ulysses_unpack": lambda: ((leaf(4, 5, 3, 8), 4, 2), {}),
    "ulysses_join": lambda: ((leaf(2, 5, 3, 8),), {}),
    "ulysses_split": lambda: ((leaf(5, 6, 8), 2), {}),
    "zero_padding_": lambda: ((torch.randn(5, 3), torch.tensor([0, 2])), {}),
    "merge_lse": lambda: (merge_inputs(True), {}),
    "merge_lse_grad": lambda: ((torch.randn(5, 2, 8), *merge_inputs(False)), {}),
    "rope": lambda: (
        (leaf(5, 2, 8), torch.arange(5), ops.rope_frequencies(6)),
        {"scale": 1.5, "interleaved": True},
    ),
    "cross_entropy": lambda: ((leaf(3, 7), LABELS, torch.rand(3)), {}),
    "cross_entropy_grad": lambda: (
        (torch.tensor(2.0), torch.randn(3, 7), LABELS, torch.randn(3), torch.rand(3)),
        {},
    ),
}


def registered():
    """The names of all ops in the `megatron_dcp` namespace."""
    schemas = torch._C._jit_get_all_schemas()
    return {s.name.split("::")[1] for s in schemas if s.name.startswith("megatron_dcp::")}


def test_every_op_has_a_sample():
    assert registered() == set(SAMPLES)


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_opcheck(name):
    args, kwargs = SAMPLES[name]()
    op = getattr(torch.ops.megatron_dcp, name).default
    torch.library.opcheck(op, args, kwargs, test_utils=TESTS)


def test_second_derivatives_are_refused():
    """Torch's own default is a warning, and their part of the result missing."""
    q, k, v, cu, segments = attention_inputs(True)
    a, la, b, lb = merge_inputs(True)
    logits = leaf(3, 7)
    for loss, x in (
        (ops.varlen_attention(q, k, v, cu, cu)[0], q),
        (ops.segment_attention(q, k, v, segments)[0], k),
        (ops.merge_lse(a, la, b, lb)[0], a),
        (ops.cross_entropy(logits, LABELS)[0], logits),
    ):
        (grad,) = torch.autograd.grad(loss.sum(), x, create_graph=True)
        with pytest.raises(NotImplementedError, match="second derivative"):
            grad.pow(2).sum().backward()


def test_missing_extension_says_how_to_build_it():
    code = (
        "import sys; sys.modules['megatron_dcp._C'] = None\n"
        "try:\n    import megatron_dcp.ops\n"
        "except ImportError as e:\n    print(type(e).__name__, e)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.startswith("OpsNotBuiltError")
    assert "setup.py build_ext --inplace" in done.stdout
