"""Transformer Engine's attention under a placement of one rank, against this package's own."""

import pytest
import torch

pytestmark = pytest.mark.gpu
LENGTHS = [700, 1, 33, 290]


def test_packed_placements_run_in_transformer_engine(device):
    pytest.importorskip("transformer_engine.pytorch", exc_type=ImportError)
    core = pytest.importorskip("megatron.core.extensions.transformer_engine")
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_dcp.adapters.megatron.attention import packed_params, plan_aware_core
    from megatron_dcp.dist import DataWorld, local_context
    from megatron_dcp.schemes import attention

    config = TransformerConfig(
        num_layers=1, hidden_size=512, num_attention_heads=8, num_query_groups=2,
        attention_dropout=0.0, bf16=True, params_dtype=torch.bfloat16,
    )  # fmt: skip
    made = plan_aware_core(core.TEDotProductAttention)(
        config, 1, AttnMaskType.causal, "self", attention_dropout=0.0
    )
    context = local_context(LENGTHS, world=DataWorld(alone=True, device=device))
    tokens = sum(LENGTHS)
    q, k, v = (torch.randn(tokens, h, 64, device=device, dtype=torch.bfloat16) for h in (8, 2, 2))
    found = made(
        q, k, v, None, attn_mask_type=AttnMaskType.causal,
        packed_seq_params=packed_params(context, tokens),
    )  # fmt: skip
    exact = attention(q.double(), k.double(), v.double(), placement=context).flatten(1)
    own = attention(q, k, v, placement=context).flatten(1)
    error = (found.double() - exact).abs().max()
    assert error <= 2 * (own.double() - exact).abs().max()
