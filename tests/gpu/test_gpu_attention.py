"""The CUDA attention kernels on a GPU, at real sizes, against float64 on the same GPU.

Bar: twice the error of the naive low-precision version. `small` tests are also what
scripts/gpu_tests.sh runs under compute-sanitizer.
"""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from gpu_reference import attention

pytestmark = pytest.mark.gpu
FULL = 1 << 40
LENGTHS = Path(__file__).parents[1] / "data" / "lengths"


def causal(lengths: list[int]) -> list[list[int]]:
    starts = torch.cumsum(torch.tensor([0, *lengths]), 0).tolist()
    return [[s, n, s, n, 0, -1] for s, n in zip(starts, lengths, strict=False)]


def pack(name: str, tokens: int, longest: int) -> list[int]:
    """The first lengths of a recorded batch, at most `longest` each, that fill `tokens`."""
    lengths, used = [], 0
    for line in (LENGTHS / name).read_text().split():
        length = min(int(line), longest, tokens - used)
        if length == 0:
            break
        lengths.append(length)
        used += length
    return lengths


def inputs(rows_q, rows_k, heads, kv_heads, dim, dtype, device):
    make = lambda rows, h: torch.randn(rows, h, dim, device=device).to(dtype)  # noqa: E731
    return make(rows_q, heads), make(rows_k, kv_heads), make(rows_k, kv_heads), make(rows_q, heads)


def error(found, wanted) -> float:
    return float((found.double() - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))


def check(device, segments, rows, *, heads=(2, 2), dim=128, dtype=torch.bfloat16, **options):
    from megatron_dcp import ops

    q, k, v, dout = inputs(rows, rows, *heads, dim, dtype, device)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    table = torch.tensor(segments, dtype=torch.int64).reshape(-1, 6)
    passed = {"softmax_scale": options.get("scale"), "softcap": options.get("softcap", 0.0)}
    out, lse = ops.segment_attention(*leaves, table, **passed)
    out.backward(dout)
    truth = attention(q, k, v, segments, dout, torch.float64, **options)
    naive = attention(q, k, v, segments, dout, dtype, **options)
    floor = 1e-6 if dtype == torch.float32 else 0.0
    for name, found, wanted, rough in zip(
        ("out", "lse", "dq", "dk", "dv"),
        (out, lse, *(x.grad for x in leaves)),
        truth,
        naive,
        strict=True,
    ):
        if name == "lse":
            assert torch.equal(found.isneginf(), wanted.isneginf())
            finite = wanted.isfinite()
            assert (found.double() - wanted)[finite].abs().max() < 2e-5 * wanted[finite].abs().max()
            continue
        assert found.isfinite().all(), name
        bar = 2 * error(rough, wanted) + floor
        assert error(found, wanted) <= bar, (name, error(found, wanted), bar)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_one_long_sequence(device, dim, dtype):
    check(device, causal([8192]), 8192, dim=dim, dtype=dtype)


@pytest.mark.parametrize("heads", [(8, 2), (4, 4)])
def test_many_short_sequences(device, heads):
    check(device, causal([256] * 32), 8192, heads=heads, dim=64)


@pytest.mark.parametrize("name", ["heavy_512.txt", "wiki_512.txt"])
def test_packs_of_recorded_lengths(device, name):
    lengths = pack(name, 8000, 6000)
    check(device, causal(lengths), 8192, heads=(4, 1), dim=128)  # 192 rows of padding


def test_window_softcap_and_rectangles(device):
    segments = [[0, 3000, 0, 3000, 0, 511], [3000, 1000, 3000, 4000, 3000, -1],
                [4000, 77, 0, 2000, FULL, -1], [4077, 300, 7000, 0, 0, -1]]  # fmt: skip
    check(device, segments, 8192, heads=(4, 2), softcap=20.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scalar_kernels(device, dtype):
    check(device, causal([700, 1, 300]), 1100, heads=(2, 1), dim=40, dtype=dtype)


@pytest.mark.parametrize("dim", [64, 72, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_small(device, dim, dtype):
    segments = [*causal([70, 1, 130]), [205, 20, 0, 33, FULL, -1], [225, 9, 40, 9, -4, 3]]
    check(device, segments, 260, heads=(2, 1), dim=dim, dtype=dtype)


def test_ring_steps_merge_in_place(device):
    """Four keys chunks against one query chunk, as one softmax; twice, bit for bit."""
    from megatron_dcp import ops

    q, k, v, dout = inputs(4096, 4096, 4, 2, 128, torch.bfloat16, device)
    steps = [torch.tensor([[0, 4096, s, 1024, -s, -1]]) for s in range(0, 4096, 1024)]
    runs = []
    for _ in range(2):
        out, lse = ops.new_accumulators(q)
        for step in steps:
            ops.segment_attention_forward(q, k, v, step, out, lse)
        grads = [torch.zeros(x.shape, device=device) for x in (q, k, v)]
        for step in steps:
            ops.segment_attention_backward(dout, q, k, v, out, lse, step, *grads)
        runs.append((out, lse, *grads))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    truth = attention(q, k, v, causal([4096]), dout, torch.float64)
    naive = attention(q, k, v, causal([4096]), dout, torch.bfloat16)
    for name, found, wanted, rough in zip("oqkv", (runs[0][0], *runs[0][2:]),
                                          (truth[0], *truth[2:]), (naive[0], *naive[2:]),
                                          strict=True):  # fmt: skip
        assert error(found, wanted) <= 2 * error(rough, wanted), name


def test_more_than_two_to_the_31_elements(device):
    from megatron_dcp import ops

    rows = (1 << 31) // (64 * 128) + 256
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GiB of free GPU memory")
    q = torch.randn(rows, 64, 128, device=device, dtype=torch.bfloat16)
    k, v = (torch.randn(rows, 1, 128, device=device, dtype=torch.bfloat16) for _ in range(2))
    last = torch.tensor([[rows - 200, 200, rows - 200, 200, 0, -1]])
    out, _ = ops.segment_attention(q, k, v, last)
    tail = slice(rows - 200, rows)
    near, _ = ops.segment_attention(q[tail], k[tail], v[tail], torch.tensor(causal([200])))
    assert torch.equal(out[tail], near)
    assert not out[: rows - 200].any()


def test_against_torch_varlen(device):
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        pytest.skip("this torch has no torch.nn.attention.varlen")
    from torch.nn.attention.varlen import varlen_attn

    from megatron_dcp import ops

    lengths = pack("wiki_512.txt", 8192, 4096)
    cu = torch.cumsum(torch.tensor([0, *lengths]), 0).to(device, torch.int32)
    q, k, v, _ = inputs(int(cu[-1]), int(cu[-1]), 8, 8, 128, torch.bfloat16, device)
    theirs = varlen_attn(q, k, v, cu, cu, max(lengths), max(lengths), is_causal=True)
    ours, _ = ops.varlen_attention(q, k, v, cu, cu)
    assert (ours.float() - theirs.float()).abs().max() < 3e-2


def test_against_flash_attention(device):
    if importlib.util.find_spec("flash_attn") is None:
        pytest.skip("flash_attn is not installed")
    from flash_attn import flash_attn_varlen_func

    from megatron_dcp import ops

    lengths = pack("wiki_512.txt", 8192, 4096)
    cu = torch.cumsum(torch.tensor([0, *lengths]), 0).to(device, torch.int32)
    q, k, v, dout = inputs(int(cu[-1]), int(cu[-1]), 8, 2, 128, torch.bfloat16, device)
    results = []
    for which in range(2):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        if which == 0:
            out, _ = ops.varlen_attention(*leaves, cu, cu)
        else:
            out = flash_attn_varlen_func(*leaves, cu, cu, max(lengths), max(lengths), causal=True)
        out.backward(dout)
        results.append((out, *(x.grad for x in leaves)))
    for ours, theirs in zip(*results, strict=True):
        assert (ours.float() - theirs.float()).abs().max() < 5e-2
