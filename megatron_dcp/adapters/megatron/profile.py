"""What `mdcp profile --model megatron:FILE` measures: a GPTModel of megatron-core, plan-aware.

FILE is JSON: fields of Megatron's TransformerConfig, and beside them `vocab_size`,
`max_sequence_length`, `rotary_base` and `transformer_impl` (`local` or `transformer_engine`).
`activation_func` is named as in torch.nn.functional. What is left out has Megatron's default,
except dropout (0) and fusions that need apex (off).

    {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2,
     "gated_linear_unit": true, "activation_func": "silu", "vocab_size": 256}

One tensor rank: planes of several would time apart and part company. The profile holds for TP 1;
give `--mdcp-cost auto` where TP is in use.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_dcp.adapters.megatron import standins
from megatron_dcp.adapters.megatron.pricing import model_spec
from megatron_dcp.dist import current_placement
from megatron_dcp.errors import AdapterError, ConfigError
from megatron_dcp.runtime.profile import Subject

_OWN = {
    "vocab_size": 32000, "max_sequence_length": 4096, "rotary_base": 10000,
    "transformer_impl": "local",
}  # fmt: skip
_DEFAULTS: dict[str, Any] = {
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "calculate_per_token_loss": True,
    "masked_softmax_fusion": False, "gradient_accumulation_fusion": False,
    "bias_dropout_fusion": False, "persist_layer_norm": False,
}  # fmt: skip


def read_model(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(TransformerConfig fields, own fields) of a file. ConfigError names what is wrong."""
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--model megatron:{path}: no JSON object can be read: {error}"
        ) from error
    from megatron.core.transformer import TransformerConfig

    known = {f.name for f in dataclasses.fields(TransformerConfig)}
    unknown = sorted(set(values) - known - set(_OWN))
    if unknown:
        raise ConfigError(
            f"--model megatron:{path}: {unknown} are no fields of Megatron's TransformerConfig, "
            f"nor of {sorted(_OWN)}"
        )
    own = {name: values.pop(name, default) for name, default in _OWN.items()}
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        if values.get(name, 1) != 1:
            raise ConfigError(
                f"--model megatron:{path}: {name} is {values[name]}; profiles are measured with 1"
            )
    if isinstance(values.get("activation_func"), str):
        values["activation_func"] = getattr(nn.functional, values["activation_func"])
    return {**_DEFAULTS, **values}, own


def _layer_spec(config: Any, implementation: str) -> Any:
    from megatron.core.models.gpt import gpt_layer_specs as specs

    experts = getattr(config, "num_moe_experts", None)
    if implementation == "transformer_engine":
        return specs.get_gpt_layer_with_transformer_engine_spec(experts)
    if implementation != "local":
        raise ConfigError(f"transformer_impl {implementation!r}: use local or transformer_engine")
    return specs.get_gpt_layer_local_spec(experts, normalization=config.normalization)


class Packed(nn.Module):
    """GPTModel on the current placement: ids, positions and labels [t] -> loss sum."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
        from megatron_dcp.adapters.megatron.attention import packed_params

        packed = packed_params(current_placement(), len(ids))
        losses: Tensor = self.inner(
            ids[None], positions[None], None, labels=labels[None], packed_seq_params=packed
        )
        return losses.float().sum()


def make_subject(path: str, *, device: torch.device, dtype: torch.dtype) -> Subject:
    """The subject of a model file; initialises Megatron's parallel state. Collective."""
    if device.type == "cpu" and not torch.cuda.is_available():
        standins.install(training=False)
    try:
        from megatron.core import parallel_state
        from megatron.core.models.gpt import GPTModel
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
        from megatron.core.transformer import TransformerConfig
    except ImportError as error:
        raise AdapterError(f"Megatron: megatron.core cannot be imported: {error}") from error
    from megatron_dcp.adapters.megatron.attention import plan_aware_spec

    fields, own = read_model(Path(path))
    if not dist.is_initialized():  # Megatron wants groups, also of one process
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)

    def build(depth: int) -> nn.Module:
        config = TransformerConfig(
            **{**fields, "num_layers": depth, "params_dtype": dtype,
               "bf16": dtype == torch.bfloat16}
        )  # fmt: skip
        spec = plan_aware_spec(_layer_spec(config, str(own["transformer_impl"])))
        model = GPTModel(
            config, spec, int(own["vocab_size"]), int(own["max_sequence_length"]),
            position_embedding_type="rope", rotary_base=int(own["rotary_base"]),
        )  # fmt: skip
        return Packed(model.to(device=device, dtype=dtype))

    whole = TransformerConfig(**fields)
    shape = model_spec(whole, int(own["vocab_size"])).shape(dtype.itemsize)
    return Subject(
        shape=shape,
        build=build,
        loss=lambda model, ids, positions, labels: model(ids, positions, labels),
        layers="inner.decoder.layers",
    )
