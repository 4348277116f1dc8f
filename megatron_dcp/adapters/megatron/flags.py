"""The `--mdcp` flags: made from the configuration records, added to Megatron's own parser.

`--mdcp` switches DCP on; without it the other flags have no effect and Megatron runs as ever.
Megatron's parser forbids abbreviations, so each flag has one spelling.
"""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any

from megatron_dcp.config import MegatronConfig, PlannerConfig
from megatron_dcp.errors import AdapterError

# Megatron's own planners: one of the two plans the step, never both.
OWN_FEATURES = (
    "dynamic_context_parallel",
    "hybrid_context_parallel",
    "sequence_packing_scheduler",
)
GRAPHS = "graphs need fixed shapes"
GATHERS = "it gathers parameters per microbatch"
# Under which a plan cannot be executed, and why. Names of megatron.training's arguments and, as far
# as it has them, of TransformerConfig's fields.
CONFLICTS = (
    ("use_megatron_fsdp", GATHERS),
    ("use_torch_fsdp2", GATHERS),
    ("enable_cuda_graph", GRAPHS),
    ("external_cuda_graph", GRAPHS),
    ("cuda_graph_impl", GRAPHS),
    ("overlap_moe_expert_parallel_comm", "its schedule interleaves two microbatches"),
    ("multi_latent_attention", "its RoPE is not plan-aware yet"),
    ("use_legacy_models", "they have no ModuleSpec"),
    ("mtp_num_layers", "multi-token prediction shifts labels across samples and shards"),
    ("heterogeneous_layers_config_path", "layers of different cost are not priced"),
    ("heterogeneous_block_specs", "layers of different cost are not priced"),
)


def _flag(name: str) -> str:
    return f"--mdcp-{name.replace('_', '-')}"


def _stock_flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


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
    _check_after_parsing(parser)
    return parser


def _check_after_parsing(parser: argparse.ArgumentParser) -> None:
    """Refuse `--mdcp` with a file of arguments while both are known (parse_args goes through here).

    Megatron puts the file's arguments in the place of the parsed ones right afterwards.
    """
    parse = parser.parse_known_args

    def parse_known_args(*args: Any, **kwargs: Any) -> Any:
        found, rest = parse(*args, **kwargs)
        refuse_file(found)
        return found, rest

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign]


def refuse_file(args: Any) -> None:
    """Raise AdapterError where `--mdcp` meets `--yaml-cfg`: the run would not be planned."""
    if getattr(args, "mdcp", False) and getattr(args, "yaml_cfg", None) is not None:
        raise AdapterError(
            f"--mdcp with --yaml-cfg {args.yaml_cfg}: Megatron takes all arguments from that file "
            "instead, --mdcp would be lost and nothing refused. Pass the arguments as flags"
        )


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


def switched_on(settings: Any, table: Iterable[tuple[str, str]]) -> Iterator[tuple[str, Any, str]]:
    """(name, value, why) of what is on among the (name, why) of a table.

    settings: arguments of megatron.training or a TransformerConfig; what it has not is off.
    """
    for name, why in table:
        value = getattr(settings, name, None)
        if value and value != "none":
            yield name, value, why


def refuse_conflicts(args: Any) -> None:
    """Raise AdapterError for flag combinations under which a plan cannot be executed."""
    for name in OWN_FEATURES:
        if getattr(args, name, None):
            raise AdapterError(
                f"--mdcp and {_stock_flag(name)} are both on: each plans the step. Remove one of "
                "the two flags"
            )
    for name, value, why in switched_on(args, CONFLICTS):
        flag = _stock_flag(name)
        found = flag if value is True else f"{flag} {value}"
        raise AdapterError(f"--mdcp does not run with {found}: {why}. Remove {flag}")
    allowed = getattr(args, "mdcp_allow_plan_dependent", False)
    for name in ("attention_dropout",) if allowed else ("attention_dropout", "hidden_dropout"):
        if float(getattr(args, name, 0.0) or 0.0) > 0.0:
            flag = _stock_flag(name)
            raise AdapterError(
                f"--mdcp with {flag} {getattr(args, name)}: Megatron draws dropout per rank, so "
                f"its pattern would depend on the plan. Pass {flag} 0"
            )
