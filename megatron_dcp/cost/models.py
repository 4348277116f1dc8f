"""Model presets and what one of their layers costs: parameters, flops, bytes per token and pair.

Every count is for one layer of one token (or one attention pair) and stands with its derivation in
`docs/cost_model.md`. Matrix products: 2 flops per parameter forward, 4 backward. Attention: 4 D
flops per pair and head forward (two products), 10 D backward (five products, the score recomputed
by the fused kernel), hence 14 D.

Video models count one *block* as a layer. 1-D blocks attend over the whole video; 2-D models
alternate blocks that attend inside a frame (spatial) and across frames (temporal), so half of
their layers carry each kind of pair.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dcp.cost.profile import ModelShape
from megatron_dcp.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder or diffusion transformer. Shapes in elements.

    mlp_matrices: 2 (GELU) or 3 (gated). text_tokens: condition tokens that each block attends to
    by cross-attention (0: no cross-attention). vocab: outputs per token.
    """

    name: str
    source: str
    pairs: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    mlp_matrices: int
    vocab: int
    text_tokens: int = 0

    def shape(self, element_bytes: int) -> ModelShape:
        return ModelShape(
            layers=self.layers, heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim,
            hidden=self.hidden, vocab=self.vocab, element_bytes=element_bytes,
        )  # fmt: skip

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer: attention, MLP and, with text, cross-attention (4 h^2)."""
        cross = 4 * self.hidden * self.hidden if self.text_tokens else 0
        return self.token_parameters + (cross // 2)

    @property
    def token_parameters(self) -> int:
        """Weights that each token is multiplied with (text K/V projections are not)."""
        h = self.hidden
        attention = h * (self.heads + 2 * self.kv_heads) * self.head_dim
        attention += self.heads * self.head_dim * h
        cross = 2 * h * h if self.text_tokens else 0
        return attention + cross + self.mlp_matrices * h * self.ffn

    @property
    def parameters(self) -> int:
        """All layers plus one output (or tied embedding) matrix."""
        return self.layers * self.layer_parameters + self.vocab * self.hidden

    @property
    def linear_flops_per_token_layer(self) -> int:
        """Forward + backward: 6 per weight, and 14 per hidden unit and text token."""
        return 6 * self.token_parameters + 14 * self.heads * self.head_dim * self.text_tokens

    @property
    def head_flops_per_token(self) -> int:
        return 6 * self.vocab * self.hidden

    @property
    def attention_flops_per_pair_layer(self) -> int:
        """Forward + backward of the fused kernel: 14 D per head."""
        return 14 * self.heads * self.head_dim

    def kept_bytes_per_token_layer(self, element_bytes: int) -> int:
        """Activations that backward needs: inputs of both norms, of QKV and of the MLP, Q K V, the
        attention output, log-sum-exp in float32, and the MLP's intermediates."""
        h, d = self.hidden, self.head_dim
        elements = 4 * h + (2 * self.heads + 2 * self.kv_heads) * d + self.mlp_matrices * self.ffn
        if self.text_tokens:
            elements += 3 * h  # norm input, query, output of cross-attention
        return elements * element_bytes + 4 * self.heads

    def checkpoint_bytes_per_token_layer(self, element_bytes: int) -> int:
        """A recomputed layer keeps its input."""
        return self.hidden * element_bytes

    def working_bytes_per_token(self, element_bytes: int) -> int:
        """One layer rebuilt by recomputation and the gradients of its widest intermediate."""
        return self.kept_bytes_per_token_layer(element_bytes) + 2 * self.ffn * element_bytes

    def head_bytes_per_token(self, element_bytes: int) -> int:
        """Logits and their float32 copy, which becomes the gradient."""
        return self.vocab * (element_bytes + 4)


def _gpt(
    name: str, source: str, layers: int, hidden: int, heads: int, vocab: int = 50257
) -> ModelSpec:
    return ModelSpec(
        name=name, source=source, pairs="causal", layers=layers, hidden=hidden, heads=heads,
        kv_heads=heads, head_dim=hidden // heads, ffn=4 * hidden, mlp_matrices=2, vocab=vocab,
    )  # fmt: skip


def _dit(
    name: str, source: str, pairs: str, layers: int, hidden: int, heads: int, text_tokens: int
) -> ModelSpec:
    return ModelSpec(
        name=name, source=source, pairs=pairs, layers=layers, hidden=hidden, heads=heads,
        kv_heads=heads, head_dim=hidden // heads, ffn=4 * hidden, mlp_matrices=2, vocab=32,
        text_tokens=text_tokens,
    )  # fmt: skip


MODELS: dict[str, ModelSpec] = {
    m.name: m
    for m in (
        ModelSpec(
            name="gpt-1m", source="the reference trainer's size, for the cpu-2core preset",
            pairs="causal", layers=4, hidden=128, heads=4, kv_heads=2, head_dim=32, ffn=384,
            mlp_matrices=3, vocab=256,
        ),
        _gpt("gpt-1.3b", "GPT-3 XL as trained by Megatron-LM", 24, 2048, 16),
        _gpt("gpt-7b", "the GPT-7B of the FlexSP paper", 32, 4096, 32),
        _gpt("gpt-13b", "the GPT-13B of the FlexSP paper", 40, 5120, 40),
        _gpt("gpt-30b", "the GPT-30B of the FlexSP paper", 60, 6656, 52),
        ModelSpec(
            name="gpt-70b",
            source="Llama 3 70B (grouped queries, gated MLP)",
            pairs="causal",
            layers=80, hidden=8192, heads=64, kv_heads=8, head_dim=128, ffn=28672,
            mlp_matrices=3, vocab=128256,
        ),
        _dit("dit-1.2b-1d", "Open-Sora block width scaled to 1.2B, joint attention", "full",
             32, 1536, 24, 300),
        _dit("dit-1.2b-2d", "Open-Sora STDiT3-XL/2: 28 spatial + 28 temporal blocks", "grid",
             56, 1152, 16, 300),
        _dit("dit-5b-1d", "CogVideoX-5B (text in the sequence, no cross-attention)", "full",
             42, 3072, 48, 0),
        _dit("dit-5b-2d", "STDiT3 scaled to 5B: 28 spatial + 28 temporal blocks", "grid",
             56, 2304, 24, 300),
    )
}  # fmt: skip


def model(name: str) -> ModelSpec:
    """A preset by name; ConfigError names the known ones."""
    if name not in MODELS:
        raise ConfigError(f"unknown model {name!r}; known are {', '.join(MODELS)}")
    return MODELS[name]
