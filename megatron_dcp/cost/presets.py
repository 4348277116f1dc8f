"""Whole cost profiles by name.

`a100-gpt7b`, `a100-gpt13b`, `a100-gpt30b`: the constants published with FlexSP for GPT models on
A100-40G, exactly as the planning notes of the project give them: pairs full, no efficiency term,
one communication term for all schemes, no head limit. `recompute_fraction` is 1/3 for linear and
attention and 0 for communication; 8 times as many tokens fit with full recompute.
"""

from __future__ import annotations

from pathlib import Path

from megatron_dcp.cost.profile import (
    CostProfile,
    Link,
    ModelShape,
    Overhead,
    RecomputeFraction,
    load,
)
from megatron_dcp.errors import ConfigError

# (max_degree, GB/s): all-to-all bandwidth per GPU, A100-40G, NVLink inside and 100G outside.
_A100_GB_PER_S = ((2, 119.5), (4, 104.0), (8, 96.5), (16, 10.33), (32, 5.94), (64, 4.87))
_A100_BUDGET_BYTES = 28_672_000_000


def _a100(
    name: str,
    *,
    layers: int,
    heads: int,
    hidden: int,
    attn_ms: float,
    linear_ms: float,
    lockstep_ms: float,
    bytes_per_token: int,
) -> CostProfile:
    """attn_ms per pair and linear_ms per token of the whole model; async overhead 20 ms."""
    kept = bytes_per_token / layers
    return CostProfile(
        name=name,
        model=ModelShape(
            layers=layers, heads=heads, kv_heads=heads, head_dim=hidden // heads, hidden=hidden,
            vocab=50257, element_bytes=2,
        ),
        pairs="full",
        linear_us_per_token=linear_ms * 1000.0,
        attn_us_per_pair=attn_ms * 1000.0,
        recompute_fraction=RecomputeFraction(linear=1 / 3, attention=1 / 3, comm=0.0),
        overhead_us=Overhead(async_=20_000.0, lockstep=lockstep_ms * 1000.0),
        links=tuple(
            Link(max_degree=d, us_per_byte=1.0 / (bw * 1000.0), latency_us=0.0)
            for d, bw in _A100_GB_PER_S
        ),
        comm_bytes_per_token_layer=16 * hidden,
        kept_bytes_per_token_layer=kept,
        checkpoint_bytes_per_token_layer=kept / 8,
        budget_bytes=_A100_BUDGET_BYTES,
    )  # fmt: skip


def _profiles() -> dict[str, CostProfile]:
    return {
        "a100-gpt7b": _a100(
            "a100-gpt7b", layers=32, heads=32, hidden=4096, attn_ms=5.128e-6,
            linear_ms=0.1839576, lockstep_ms=629.0, bytes_per_token=4_480_000,
        ),
        "a100-gpt13b": _a100(
            "a100-gpt13b", layers=40, heads=40, hidden=5120, attn_ms=9.2852e-6,
            linear_ms=0.3060, lockstep_ms=1132.6, bytes_per_token=4_220_000,
        ),
        "a100-gpt30b": _a100(
            "a100-gpt30b", layers=60, heads=52, hidden=6656, attn_ms=15.4262e-6,
            linear_ms=0.8036, lockstep_ms=2789.0, bytes_per_token=3_420_000,
        ),
    }  # fmt: skip


PROFILE_NAMES: tuple[str, ...] = tuple(_profiles())


def resolve(name_or_path: str) -> CostProfile:
    """A preset by name, or a profile file by path."""
    profiles = _profiles()
    if name_or_path in profiles:
        return profiles[name_or_path]
    if Path(name_or_path).suffix == ".json" or "/" in name_or_path:
        return load(name_or_path)
    raise ConfigError(
        f"cost {name_or_path!r}: neither a preset ({', '.join(PROFILE_NAMES)}) nor a .json file"
    )
