"""The `--mdcp` flags: made from the configuration records, added to Megatron's own parser.

`--mdcp` switches DCP on; without it the other flags have no effect and Megatron runs as ever.
Megatron's parser forbids abbreviations, so each flag has one spelling.
"""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from typing import Any

from megatron_dcp.config import MegatronConfig, PlannerConfig
from megatron_dcp.errors import AdapterError

# Megatron's own planners: one of the two plans the step, never both.
OWN_FEATURES = {
    "dynamic_context_parallel": "--dynamic-context-parallel",
    "hybrid_context_parallel": "--hybrid-context-parallel",
    "sequence_packing_scheduler": "--sequence-packing-scheduler",
}


def _flag(name: str) -> str:
    return f"--mdcp-{name.replace('_', '-')}"


def _options(hint: Any) -> tuple[type, list[str] | None]:
    """(argparse type, choices) of a field's type."""
    if typing.get_origin(hint) is typing.Literal:
        return str, [str(v) for v in typing.get_args(hint)]
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        inner = [a for a in typing.get_args(hint) if a is not type(None)]
        return _options(inner[0])
    return hint, None


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--mdcp` and one flag per field of PlannerConfig and MegatronConfig."""
    if "--mdcp" in parser._option_string_actions:
        return parser  # a patched tree under `mdcp launch`
    group = parser.add_argument_group("megatron-dcp", "plan every step from its sequence lengths")
    group.add_argument("--mdcp", action="store_true", help="run under a plan made every step")
    for record in (PlannerConfig, MegatronConfig):
        hints = typing.get_type_hints(record)
        for item in dataclasses.fields(record):
            kind, choices = _options(hints[item.name])
            text = f"{record.__name__}.{item.name}, default {item.default}"
            if kind is bool:
                group.add_argument(_flag(item.name), action="store_true", help=text)
            else:
                group.add_argument(
                    _flag(item.name), type=kind, choices=choices, default=item.default, help=text
                )
    return parser


def read_flags(args: Any) -> tuple[PlannerConfig, MegatronConfig]:
    """The two records from parsed arguments; a missing attribute takes the field's default."""

    def build(record: Any) -> Any:
        values = {
            f.name: getattr(args, f"mdcp_{f.name}")
            for f in dataclasses.fields(record)
            if hasattr(args, f"mdcp_{f.name}")
        }
        return record(**values)

    return build(PlannerConfig), build(MegatronConfig)


def refuse_conflicts(args: Any) -> None:
    """Raise AdapterError for flag combinations under which a plan cannot be executed."""
    for name, flag in OWN_FEATURES.items():
        if getattr(args, name, None):
            raise AdapterError(
                f"--mdcp and {flag} are both on: each plans the step. Remove one of the two flags"
            )
    refusals = (
        ("use_megatron_fsdp", "--use-megatron-fsdp", "it gathers parameters per microbatch"),
        ("use_torch_fsdp2", "--use-torch-fsdp2", "it gathers parameters per microbatch"),
        ("enable_cuda_graph", "--enable-cuda-graph", "graphs need fixed shapes"),
        ("external_cuda_graph", "--external-cuda-graph", "graphs need fixed shapes"),
        ("overlap_moe_expert_parallel_comm", "--overlap-moe-expert-parallel-comm",
         "its schedule interleaves two microbatches"),
        ("multi_latent_attention", "--multi-latent-attention", "its RoPE is not plan-aware yet"),
        ("use_legacy_models", "--use-legacy-models", "they have no ModuleSpec"),
        ("mtp_num_layers", "--mtp-num-layers",
         "multi-token prediction shifts labels across shards"),
        ("heterogeneous_layers_config_path", "--heterogeneous-layers-config-path",
         "layers of different cost are not priced"),
    )  # fmt: skip
    for name, flag, why in refusals:
        if getattr(args, name, None):
            raise AdapterError(f"--mdcp does not run with {flag}: {why}. Remove {flag}")
    graphs = getattr(args, "cuda_graph_impl", "none")
    if graphs not in (None, "none"):
        raise AdapterError(
            f"--mdcp does not run with --cuda-graph-impl {graphs}: graphs need fixed shapes. "
            "Remove --cuda-graph-impl"
        )
    for name in ("attention_dropout", "hidden_dropout"):
        if float(getattr(args, name, 0.0) or 0.0) > 0.0:
            flag = "--" + name.replace("_", "-")
            raise AdapterError(
                f"--mdcp with {flag} {getattr(args, name)}: Megatron draws dropout per rank, so "
                f"its pattern would depend on the plan. Pass {flag} 0"
            )
