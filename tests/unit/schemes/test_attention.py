"""`mdcp.attention` on one rank: packed evaluation, batch dimension, errors that say what to do."""

from __future__ import annotations

import pytest
import torch

import megatron_dcp as mdcp
from megatron_dcp.dist import DataWorld, local_context, make_context
from megatron_dcp.errors import ConfigError
from megatron_dcp.plan import Placement
from megatron_dcp.schemes import AttentionOptions, find_scheme
from megatron_dcp.testing.reference import dense_attention, visible


def qkv(total: int, heads: int = 4, kv_heads: int = 2) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(total, h, 8, dtype=torch.float64) for h in (heads, kv_heads, kv_heads)]


def test_packed_runs_samples_apart() -> None:
    q, k, v = qkv(12)
    with mdcp.packed([5, 7]) as pack:
        out = mdcp.attention(q, k, v)
        batched = mdcp.attention(q[None], k[None], v[None])
    assert pack.position_ids.tolist() == [*range(5), *range(7)]
    want = torch.cat(
        [dense_attention(q[a:b], k[a:b], v[a:b], visible(b - a)) for a, b in ((0, 5), (5, 12))]
    )
    assert torch.allclose(out, want, atol=1e-12)
    assert torch.equal(batched[0], out)


def test_only_a_causal_mask_keeps_padding_from_real_tokens() -> None:
    q, k, v = qkv(12)
    alone = Placement(slot=0, first_rank=0, degree=1, samples=(0,))
    ctx = make_context(DataWorld(alone=True), alone, [12], padded=True)
    with pytest.raises(ConfigError, match="shape_quantum"):
        mdcp.attention(q, k, v, causal=False, placement=ctx)
    want = dense_attention(q[:9], k[:9], v[:9], visible(9))
    assert torch.allclose(mdcp.attention(q, k, v, placement=ctx)[:9], want, atol=1e-12)


def test_outside_a_microbatch_it_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"no placement is current.*mdcp\.packed"):
        mdcp.attention(*qkv(3))


def test_the_placement_ends_with_its_block() -> None:
    with mdcp.packed([3]):
        mdcp.attention(*qkv(3))
    with pytest.raises(ConfigError, match="no placement"):
        mdcp.attention(*qkv(3))


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((4, 4, 8), (4, 2, 8), (4, 2, 8)), "this rank holds 3 rows"),
        (((3, 4, 8), (3, 3, 8), (3, 3, 8)), "multiple of KV heads"),
        (((3, 4, 8), (3, 2, 8), (3, 1, 8)), "k and v alike"),
        (((3, 32), (3, 16), (3, 16)), "tokens, heads, head_dim"),
    ],
)
def test_wrong_shapes_are_named(shapes: tuple[tuple[int, ...], ...], message: str) -> None:
    with mdcp.packed([3]), pytest.raises(ConfigError, match=message):
        mdcp.attention(*(torch.zeros(s) for s in shapes))


@pytest.mark.parametrize("odd", range(3))
def test_mixed_dtypes_are_refused_whatever_the_scheme(odd: int) -> None:
    """An all-to-all would promote them, other schemes would not."""
    given = qkv(3)
    given[odd] = given[odd].float()
    with mdcp.packed([3]), pytest.raises(ConfigError, match="pass one dtype"):
        mdcp.attention(*given)


def test_a_window_may_be_a_list_as_configs_give_it() -> None:
    with mdcp.packed([3, 4], prefix=[2, 0]):
        given = mdcp.attention(*qkv(7), window_size=[1, 0])  # type: ignore[arg-type]
        assert torch.equal(given, mdcp.attention(*qkv(7), window_size=(1, 0)))


def test_no_heads_are_refused() -> None:
    q, k, v = qkv(3)
    with mdcp.packed([3]), pytest.raises(ConfigError, match="0 KV heads"):
        mdcp.attention(q, k[:, :0], v[:, :0])


def test_a_second_derivative_is_an_error_and_not_left_out() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(8))
    context = local_context([5, 3])
    for scheme in ("local", "ring"):
        out = find_scheme(scheme)(q, k, v, context, AttentionOptions())
        (grad,) = torch.autograd.grad(out.pow(2).sum(), q, create_graph=True)
        with pytest.raises((NotImplementedError, RuntimeError), match=r"second deriv|twice"):
            grad.pow(2).sum().backward()


def test_attention_over_the_grid_says_what_is_missing() -> None:
    q = qkv(12)
    with mdcp.packed([12]), pytest.raises(ConfigError, match="this microbatch has no shapes"):
        mdcp.attention(*q, axis="space", causal=False)
    with mdcp.packed([12], shapes=[(3, 2, 2)]):
        with pytest.raises(ConfigError, match="belongs to axis"):
            mdcp.attention(*q, rows="time")
        with pytest.raises(ConfigError, match="use 'space'"):
            mdcp.attention(*q, axis="depth", causal=False)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="5 rows given, this rank holds 12"):
            mdcp.switch_rows(q[0][:5], source="own", target="time")
    shapes, documents = [(3, 2, 2)], [[4, 8]]
    with (
        mdcp.packed([12], shapes=shapes, documents=documents),
        pytest.raises(ConfigError, match="no documents"),
    ):
        mdcp.attention(*q, axis="space", causal=False)
