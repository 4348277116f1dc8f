"""What one worker of a contract test does with real megatron-core besides comparing two trainings.

Refusals, evaluation, a rerun of a step, a missing stand-in, a measured profile. Models, samples and
the training loop are those of `megatron_cases`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_dcp.adapters.megatron import standins
from megatron_dcp.config import MegatronConfig, PlannerConfig
from megatron_dcp.errors import MdcpError
from tests.contracts.megatron_cases import (
    LONGEST,
    ONE_RANK,
    SAMPLES,
    VOCAB,
    build,
    grid_of,
    items_of,
    mean_loss,
    sample,
    static_forward,
    train,
    transformer_config,
)
from tests.contracts.megatron_plans import register_first, register_mix


def refused(**case: Any) -> dict[str, Any]:
    """Start the planned run of a case that must be refused.

    Returns the error of this rank and how many steps it had begun.
    """
    standins.install(training=False)
    from megatron.core import parallel_state as ps

    case = {**ONE_RANK, "steps": 1, **case}
    if "flight" in case:
        case["memory_gb"] = budget_for(case["flight"])
    ps.initialize_model_parallel(**grid_of(case))
    begun: list[int] = []
    try:
        train(case, True, begun=begun)
        return {"error": "", "kind": "", "steps": len(begun)}
    except MdcpError as error:
        return {"error": str(error), "kind": type(error).__name__, "steps": len(begun)}
    finally:
        ps.destroy_model_parallel()


def budget_for(microbatches: float) -> float:
    """GB in which the longest sample of step 0 fits two stages that hold so many microbatches.

    1F1B holds as many on the first stage as there are stages: 2 here.
    """
    from megatron_dcp.adapters.megatron.pricing import model_profile
    from megatron_dcp.plan import Topology

    two = Topology(data_ranks=1, ranks_per_node=1, pipeline_stages=2)
    profile = model_profile(transformer_config({}), VOCAB, two, PlannerConfig(), MegatronConfig())
    longest = max(sample(0, i)["tokens"].shape[1] for i in range(SAMPLES))
    stage = profile.checkpoint_bytes_per_token_layer * profile.model.layers / 2
    token = stage * microbatches + profile.working_bytes_per_token + profile.head_bytes_per_token
    return (profile.static_bytes + longest * token) / 1e9


def lockstep(**case: Any) -> int:
    """Ranks per lockstep domain of a grid."""
    standins.install(training=False)
    from megatron.core import parallel_state as ps

    from megatron_dcp.adapters.megatron.domain import build_domain

    ps.initialize_model_parallel(**grid_of({**ONE_RANK, **case}))
    try:
        return build_domain().lockstep
    finally:
        ps.destroy_model_parallel()


def _share() -> tuple[int, int]:
    """(data-parallel rank, items per data-parallel rank)."""
    from megatron.core import parallel_state as ps

    return ps.get_data_parallel_rank(), SAMPLES // ps.get_data_parallel_world_size()


def _call(
    schedule: Callable[..., Any], chunks: list[Any], data: Any, count: int, *, forward_only: bool
) -> Any:
    return schedule(
        forward_step_func=static_forward, data_iterator=data, model=chunks,
        num_microbatches=count, seq_length=LONGEST, micro_batch_size=1,
        forward_only=forward_only,
    )  # fmt: skip


def evaluate(**case: Any) -> dict[str, Any]:
    """Reports of one call without backward, on the last stage: planned, and plain as a sum."""
    standins.install(training=False)
    from megatron.core import parallel_state as ps
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_dcp.adapters.megatron.runner import MegatronDcp

    case = {**ONE_RANK, **case}
    ps.initialize_model_parallel(**grid_of(case))
    strategy = {"first": register_first, "mix": register_mix}[case["plans"]]()
    try:
        out: dict[str, Any] = {"last": ps.is_pipeline_last_stage()}
        for planned in (False, True):
            chunks, _, _ = build(case, planned)
            schedule: Callable[..., Any] = get_forward_backward_func()
            dcp = MegatronDcp(planner=PlannerConfig(strategy=strategy))
            if planned:
                schedule = dcp.wrap(schedule)
            replica, count = _share()
            data = iter(items_of(case, 0, replica, count))
            reports = _call(schedule, chunks, data, count, forward_only=True)
            values = [r["lm loss"].tolist() for r in reports]
            if not planned:
                total = torch.tensor(values or [[0.0, 0.0]], dtype=torch.float64).sum(0)
                dist.all_reduce(total, group=ps.get_data_parallel_group())
                values = [total.tolist()]
            out["planned" if planned else "static"] = values
        return out
    finally:
        ps.destroy_model_parallel()


def replay(**case: Any) -> dict[str, Any]:
    """One step, the iterator rewound as Megatron's rerun machine does it, and the step again.

    The step follows one that routed unevenly, for losses that depend on it.
    """
    standins.install(training=False)
    from megatron.core import parallel_state as ps
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.rerun_state_machine import (
        RerunDataIterator,
        RerunMode,
        destroy_rerun_state_machine,
        initialize_rerun_state_machine,
    )

    from megatron_dcp.adapters.megatron.runner import MegatronDcp

    case = {**ONE_RANK, **case}
    ps.initialize_model_parallel()
    initialize_rerun_state_machine(mode=RerunMode.VALIDATE_RESULTS)
    try:
        chunks, _, _ = build(case, planned=True)
        losses: list[float] = []
        dcp = MegatronDcp(
            planner=PlannerConfig(strategy=register_mix()), step_of=lambda: len(losses) // 2
        )
        dcp.load_state_dict({"steps": 0, "expert_counts": [[70, 20, 10, 0]] * 2})
        schedule = dcp.wrap(get_forward_backward_func())
        replica, count = _share()
        rows = [item for step in (0, 1) for item in items_of({}, step, replica, count)]
        iterator = RerunDataIterator(iter(rows))
        gradients = []
        for attempt in range(3):  # twice the first step, then the next one
            for chunk in chunks:
                chunk.zero_grad_buffer()
            reports = _call(schedule, chunks, iterator, count, forward_only=False)
            losses.append(mean_loss(reports))
            gradients.append(torch.cat([p.main_grad.flatten() for p in chunks[0].parameters()]))
            if attempt == 0:
                iterator.rewind()
            else:
                iterator.advance()
        return {
            "losses": losses,
            "digests": dcp.digests,
            "equal": torch.equal(gradients[0], gradients[1]),
            "next_differs": not torch.equal(gradients[1], gradients[2]),
        }
    finally:
        destroy_rerun_state_machine()
        ps.destroy_model_parallel()


def without(*, piece: str, **case: Any) -> str:
    """The error of one step of plain Megatron without a stand-in; "" when there is none."""
    standins.remove()
    standins.install(training=False, leave_out=(piece,))
    from megatron.core import parallel_state as ps

    case = {**ONE_RANK, "steps": 1, **case}
    try:
        ps.initialize_model_parallel(**grid_of(case))
        train(case, False)
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        ps.destroy_model_parallel()
        standins.remove()


MEASURED = {
    "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2,
    "ffn_hidden_size": 64, "gated_linear_unit": True, "activation_func": "silu",
    "add_bias_linear": False, "normalization": "RMSNorm", "vocab_size": VOCAB,
}  # fmt: skip


def profile_then_train(*, folder: str) -> dict[str, Any]:
    """`mdcp profile` of the model above on these ranks, then three steps planned by the profile."""
    standins.install(training=False)
    from megatron.core import parallel_state as ps

    from megatron_dcp.adapters.megatron.profile import make_subject
    from megatron_dcp.cost import dumps
    from megatron_dcp.dist import DataWorld
    from megatron_dcp.plan import Topology
    from megatron_dcp.runtime.profile import check_same, profile_model

    file = Path(folder) / "model.json"
    if dist.get_rank() == 0:
        file.write_text(json.dumps(MEASURED))
    dist.barrier()
    world = DataWorld()
    try:
        subject = make_subject(str(file), device=torch.device("cpu"), dtype=torch.float32)
        topology = Topology(data_ranks=world.size, ranks_per_node=world.size)
        fitted = profile_model(
            world, subject, topology, name="megatron", max_tokens=64, repeats=1, limit_s=0.0,
            budget_bytes=10**9,
        )  # fmt: skip
        check_same(world, fitted)
        profile = Path(folder) / "profile.json"
        if dist.get_rank() == 0:
            profile.write_text(dumps(fitted.profile))
        dist.barrier()
        case = {**ONE_RANK, "steps": 3, "strategy": "dcp"}
        trained = train({**case, "cost": str(profile)}, True)
    finally:
        world.close()
        ps.destroy_model_parallel()
    return {"errors": fitted.errors, "profile": dumps(fitted.profile), **trained}
