"""The preset tables of docs/cost_model.md, as markdown: `python -m megatron_dcp.cost.tables`.

A test compares the page with what this prints, so that the two cannot drift.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_dcp.cost.derive import attention_flops_per_s, profile
from megatron_dcp.cost.hardware import HARDWARE
from megatron_dcp.cost.model import CostModel, Mode, sample_pack
from megatron_dcp.cost.models import MODELS
from megatron_dcp.cost.presets import resolve
from megatron_dcp.plan import Topology

MARK = "<!-- printed by: python -m megatron_dcp.cost.tables -->"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join("---" for _ in head) + " |"]
    lines += ["| " + " | ".join(str(x) for x in row) + " |" for row in rows]
    return "\n".join(lines)


def hardware_table() -> str:
    head = (
        "hardware", "TFLOP/s", "memory GB", "memory TB/s", "node link GB/s", "network GB/s",
        "gemm", "attention", "memory eff.", "link eff.", "half tokens", "source",
    )  # fmt: skip
    rows = []
    for h in HARDWARE.values():
        e = h.efficiency
        rows.append((
            h.name, f"{h.peak_flops / 1e12:g}", f"{h.memory_bytes / 1e9:g}",
            f"{h.memory_bytes_per_s / 1e12:g}", f"{h.node_link_bytes_per_s / 1e9:g}",
            f"{h.net_link_bytes_per_s / 1e9:g}", e.gemm, e.attention, e.memory, e.link,
            e.attention_half_tokens, h.source,
        ))  # fmt: skip
    return _markdown(head, rows)


def model_table() -> str:
    head = (
        "model", "layers", "hidden", "heads / KV", "head dim", "parameters", "pairs",
        "linear MFLOP / token / layer", "attention FLOP / pair / layer",
        "kept bytes / token / layer", "source",
    )  # fmt: skip
    rows = []
    for m in MODELS.values():
        e = 4 if m.name == "gpt-1m" else 2
        rows.append((
            m.name, m.layers, m.hidden, f"{m.heads} / {m.kv_heads}", m.head_dim,
            f"{m.parameters / 1e9:.3g} B", m.pairs, f"{m.linear_flops_per_token_layer / 1e6:.4g}",
            m.attention_flops_per_pair_layer, m.kept_bytes_per_token_layer(e), m.source,
        ))  # fmt: skip
    return _markdown(head, rows)


def check_table() -> str:
    """Derived coefficients on A100-40G, 64 ranks, ZeRO-3, beside the constants of FlexSP."""
    topology = Topology(data_ranks=64, ranks_per_node=8)
    head = (
        "model", "linear us / token: derived", "published", "attention ns / pair of L^2: derived",
        "published", "tokens that fit without recompute: derived", "published",
    )  # fmt: skip
    rows = []
    for name, published in (
        ("gpt-7b", "a100-gpt7b"),
        ("gpt-13b", "a100-gpt13b"),
        ("gpt-30b", "a100-gpt30b"),
    ):
        p, q = profile("a100-40g", name, topology, lockstep=64), resolve(published)
        layers = p.model.layers
        per_token = p.kept_bytes_per_token_layer * layers
        per_token += p.working_bytes_per_token + p.head_bytes_per_token
        fits = (p.budget_bytes - p.static_bytes) / per_token
        theirs = q.budget_bytes / (q.kept_bytes_per_token_layer * layers)
        rows.append((
            name, f"{p.linear_us_per_token:.1f}", f"{q.linear_us_per_token:.1f}",
            f"{p.attn_us_per_pair / 2 * 1e3:.2f}", f"{q.attn_us_per_pair * 1e3:.2f}",
            f"{fits:.0f}", f"{theirs:.0f}",
        ))  # fmt: skip
    return _markdown(head, rows)


def derived_table() -> str:
    """Coefficients of every model on H200, 32 ranks in nodes of 8 (ZeRO-3 where it must)."""
    topology = Topology(data_ranks=32, ranks_per_node=8)
    head = (
        "profile", "state", "linear us / token", "attention TFLOP/s", "attention ns / pair",
        "half tokens", "overhead ms", "state GB", "budget GB",
    )  # fmt: skip
    rows = []
    hw = HARDWARE["h200"]
    for m in MODELS.values():
        if m.name == "gpt-1m":
            continue
        replicated = m.parameters * 6 < 0.7 * hw.budget_bytes
        lockstep = 1 if replicated else topology.data_ranks
        p = profile(hw, m, topology, lockstep=lockstep)
        o = p.overhead_us
        pair = p.attn_us_per_pair or p.attn_spatial_us_per_pair
        rows.append((
            p.name, "ZeRO-1" if replicated else "ZeRO-3", f"{p.linear_us_per_token:.2f}",
            f"{attention_flops_per_s(hw, m) / 1e12:.0f}", f"{pair * 1e3:.3f}",
            f"{p.linear_half_tokens} / {p.attn_half_tokens}",
            f"{(o.async_ if replicated else o.lockstep) / 1e3:.1f}",
            f"{p.static_bytes / 1e9:.1f}", f"{p.budget_bytes / 1e9:.1f}",
        ))  # fmt: skip
    return _markdown(head, rows)


def all_tables() -> dict[str, str]:
    return {
        "Hardware": hardware_table(),
        "Models": model_table(),
        "Check against published constants": check_table(),
        "Derived profiles on H200": derived_table(),
    }


def example() -> None:
    """The worked example of docs/cost_model.md: 32,768 tokens on 8 ranks and on 1."""
    p = profile("h200", "gpt-7b", Topology(data_ranks=32, ranks_per_node=8))
    cost = CostModel(p, Topology(data_ranks=32, ranks_per_node=8))
    pack = sample_pack(p, 32768)
    for degree, mode in ((8, Mode("ulysses", 8)), (1, Mode("local", 1))):
        linear, attention, comm = cost.parts_us(pack, degree, mode, 0)
        print(
            f"degree {degree}: linear {linear / 1e3:.1f} ms, attention {attention / 1e3:.1f} ms, "
            f"communication {comm / 1e3:.1f} ms, overhead {cost.overhead_us / 1e3:.1f} ms, "
            f"total {cost.time_us(pack, degree, mode, 0) / 1e3:.1f} ms, "
            f"{cost.bytes(pack, degree, mode, 0) / 1e9:.1f} GB"
        )


if __name__ == "__main__":
    for title, text in all_tables().items():
        print(f"### {title}\n\n{text}\n")
