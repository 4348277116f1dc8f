"""What the expert cases need besides plain Megatron: norms, a reference loss, a resume."""

from __future__ import annotations

import copy
import dataclasses
import json
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class SequenceParallelNorm(torch.nn.RMSNorm):
    """Without apex and TE Megatron has no norm for sequence parallelism; only the mark misses."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps)
        self.weight.sequence_parallel = True


def sequence_parallel_spec(layer: Any, layers: int) -> Any:
    """A block spec of `layers` layers like `layer`, with the norms above."""
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    norm = SequenceParallelNorm
    inner = dataclasses.replace(layer.submodules, input_layernorm=norm, pre_mlp_layernorm=norm)
    layer = dataclasses.replace(layer, submodules=inner)
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=norm)


class LaggedLoss:
    """Plain Megatron's global loss with the expert counts of the previous step.

    By Megatron's own loss function; the static run has real tokens only.
    """

    def __init__(self, chunks: list[Any]) -> None:
        self.before: dict[int, Tensor] = {}
        self.now: dict[int, Tensor] = {}
        for chunk in chunks:
            for module in chunk.modules():
                if hasattr(module, "_apply_global_aux_loss"):
                    module._apply_global_aux_loss = partial(self.apply, module)

    def apply(
        self, router: Any, probs: Tensor, scores: Tensor, routing_map: Tensor, **_: Any
    ) -> Tensor:
        from megatron.core.transformer.moe.moe_utils import (
            MoEAuxLossAutoScaler,
            switch_load_balancing_loss_func,
        )

        layer = router.layer_number
        self.now[layer] = self.now.get(layer, 0) + routing_map.sum(0)
        if layer not in self.before:
            return probs
        counts = self.before[layer]
        tokens = int(counts.sum()) // router.topk
        loss = switch_load_balancing_loss_func(
            probs=scores,
            tokens_per_expert=counts.float(),
            total_num_tokens=tokens,
            topk=router.topk,
            num_experts=len(counts),
            moe_aux_loss_coeff=router.get_aux_loss_coeff("global_aux_loss"),
        )
        out: Tensor = MoEAuxLossAutoScaler.apply(probs, loss * tokens)
        return out

    def end(self) -> None:
        from megatron.core import parallel_state as ps

        for layer in sorted(self.now):
            dist.all_reduce(self.now[layer], group=ps.get_tensor_and_data_parallel_group(True))
        self.before, self.now = self.now, {}


def uses_global_loss(case: dict[str, Any]) -> bool:
    return "global_aux_loss" in case.get("model", {}).get("moe_router_load_balancing_type", "")


def keep(chunks: list[Any], optimizer: Any, dcp: Any) -> dict[str, Any]:
    """A checkpoint in memory; what is ours goes through JSON."""
    return {
        "model": copy.deepcopy([c.state_dict() for c in chunks]),
        "optimizer": copy.deepcopy(optimizer.state_dict()),
        "mdcp": json.loads(json.dumps(dcp.state_dict())),
    }


def restore(state: dict[str, Any], chunks: list[Any], optimizer: Any, dcp: Any) -> None:
    for chunk, saved in zip(chunks, state["model"], strict=True):
        chunk.load_state_dict(saved)
    optimizer.load_state_dict(state["optimizer"])
    dcp.load_state_dict(state["mdcp"])


def resume(**case: Any) -> dict[str, Any]:
    """Six steps; three, all objects anew and three more; those three without expert counts."""
    from megatron.core import parallel_state as ps

    from megatron_dcp.adapters.megatron import standins
    from tests.contracts import megatron_cases as cases

    standins.install(training=False)
    case = {**cases.ONE_RANK, "steps": 6, "keep": True, **case}
    ps.initialize_model_parallel(**cases.grid_of(case))
    try:
        whole = cases.train(case, True)
        first = cases.train({**case, "steps": 3}, True)
        state = first.pop("state")
        rest = cases.train(case, True, state)
        forgetful = {**state, "mdcp": {**state["mdcp"], "expert_counts": None}}
        without = cases.train(case, True, forgetful)
        for result in (whole, rest, without):
            result.pop("state")
        return {"whole": whole, "first": first, "rest": rest, "without": without}
    finally:
        ps.destroy_model_parallel()


def refusals(*, settings: list[dict[str, Any]], allowed: bool = False) -> list[str]:
    """What the check of a model says of each of some settings; "" where it lets them pass."""
    from megatron_dcp.adapters.megatron import standins
    from megatron_dcp.adapters.megatron.checks import check_model
    from megatron_dcp.config import MegatronConfig
    from megatron_dcp.errors import AdapterError
    from tests.contracts.megatron_cases import transformer_config

    standins.install(training=False)
    out = []
    for options in settings:
        try:
            check_model(transformer_config(options), MegatronConfig(allow_plan_dependent=allowed))
            out.append("")
        except AdapterError as error:
            out.append(str(error))
    return out


def logged(*, names: list[str], **case: Any) -> list[dict[str, float]]:
    """Megatron's own log of balance losses, when all data ranks but one have dummies only.

    After one step, and after two more in the same process: its entries stay.
    """
    from megatron.core import parallel_state as ps

    from megatron_dcp.adapters.megatron import standins
    from tests.contracts import megatron_cases as cases
    from tests.contracts.megatron_plans import register_first

    standins.install(training=False)
    case = {**cases.ONE_RANK, "strategy": register_first(), **case}
    ps.initialize_model_parallel(**cases.grid_of(case))
    try:
        out = []
        for steps in (1, 2):  # twice: entries of the first run stay
            cases.train({**case, "steps": steps}, True)
            out.append(_log(names))
        return out
    finally:
        ps.destroy_model_parallel()


def _log(names: list[str]) -> dict[str, float]:
    """As `training_log` asks for it, in the way of this version."""
    totals: dict[str, Tensor] = {}
    settings = {
        "loss_scale": 1.0, "iteration": 1, "writer": None, "total_loss_dict": totals,
        "force_initialize": True, "track_names": names, "num_layers": 2,
    }  # fmt: skip
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:
        from megatron.core.transformer.moe.moe_utils import track_moe_metrics

        track_moe_metrics(**settings)  # type: ignore[arg-type]
    else:
        get_moe_metrics_tracker().report(**settings)
    return {name: float(total) for name, total in totals.items()}
