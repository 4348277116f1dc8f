"""What one worker of a contract test does: train real megatron-core, static and planned.

Both runs of a case start from the same weights and see the same samples every step. The static run
is Megatron as it is: its own attention and RoPE on one unpadded sample per microbatch. Results are
losses (token means over the step) and gradient norms, as Megatron reports them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial, wraps
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dcp.adapters.megatron import standins
from megatron_dcp.adapters.megatron.microbatch import sum_loss as loss_func
from megatron_dcp.config import MegatronConfig, PlannerConfig
from tests.contracts import megatron_data, megatron_experts, megatron_losses
from tests.contracts.megatron_plans import register_mix

VOCAB = 96
LONGEST = 48
SAMPLES = 8
# A grid of data ranks alone.
ONE_RANK: dict[str, Any] = {"tp": 1, "pp": 1, "vp": None, "ep": 1, "cp": 1}


def preload() -> None:
    """Import what every case imports; the stand-ins are there meanwhile and taken out again."""
    standins.install(training=False)
    for name in ("distributed", "models.gpt", "optimizer", "pipeline_parallel"):
        import_module(f"megatron.core.{name}")
    import_module("megatron_dcp.adapters.megatron.runner")
    standins.remove()


def sample(step: int, index: int, multiple: int = 1) -> dict[str, Tensor]:
    """One sample of the step as a data set gives it: tensors [1, L]; lengths vary, some are 1.

    multiple: of what lengths are rounded up to, for the static run's sequence parallelism.
    """
    rng = random.Random(7919 * step + index)
    length = min(LONGEST, max(1, int(math.exp(rng.gauss(2.6, 0.9)))))
    length = -(-length // multiple) * multiple
    generator = torch.Generator().manual_seed(104729 * step + index)
    tokens = torch.randint(0, VOCAB, (1, length + 1), generator=generator)
    weights = (torch.rand(1, length, generator=generator) > 0.2).float()
    weights[0, -1] = 1.0
    return {
        "tokens": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "loss_mask": weights,
        "position_ids": torch.arange(length)[None],
    }


def static_forward(iterator: Iterator[dict[str, Tensor]], model: Any) -> Any:
    """The forward step of the static run: one sample as it is."""
    item = next(iterator)
    output = model(item["tokens"], item["position_ids"], None, labels=item["labels"])
    return output, partial(loss_func, item["loss_mask"])


FORWARDS = {
    "static": static_forward,
    "mean": megatron_losses.mean_forward,
    "nested": megatron_losses.nested_forward,
}


def transformer_config(options: dict[str, Any]) -> Any:
    from megatron.core.transformer import TransformerConfig

    base: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 64,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "calculate_per_token_loss": True,
        "variable_seq_lengths": True,  # the static run is unpadded, too
        "moe_token_dispatcher_type": "alltoall",
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "pipeline_dtype": torch.float32,
    }
    return TransformerConfig(**{**base, **options})


def build(case: dict[str, Any], planned: bool) -> tuple[list[Any], Any, Any]:
    """(model chunks, optimizer, config) from the case's seed."""
    from megatron.core import parallel_state as ps
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.spec_utils import ModuleSpec

    from megatron_dcp.adapters.megatron.attention import plan_aware_spec

    torch.manual_seed(5)
    model_parallel_cuda_manual_seed(5)
    options = dict(case.get("model", {}))
    if case.get("bf16"):
        options.update(bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16)
    overlap = case["vp"] is not None and not case.get("default_p2p")
    if planned:  # the adapter switches it on where stages exchange shapes
        options.setdefault("variable_seq_lengths", False)
    config = transformer_config(
        {
            **options,
            "tensor_model_parallel_size": case["tp"],
            "pipeline_model_parallel_size": case["pp"],
            "virtual_pipeline_model_parallel_size": case["vp"],
            "expert_model_parallel_size": case["ep"],
            "context_parallel_size": case["cp"] if planned else 1,
            "expert_tensor_parallel_size": case.get("etp"),
            "overlap_p2p_comm": overlap,
            "batch_p2p_comm": not overlap,
        }
    )
    spec = get_gpt_layer_local_spec(options.get("num_moe_experts"), normalization="RMSNorm")
    if case.get("mixer"):  # another module where the self-attention was
        mixer = import_module("megatron.core.ssm.gated_delta_net").GatedDeltaNet
        spec.submodules.self_attention = ModuleSpec(module=mixer)
    if config.sequence_parallel:
        spec = megatron_experts.sequence_parallel_spec(spec, config.num_layers)
    if planned and not case.get("plain"):
        spec = plan_aware_spec(spec)
    distributed = bool(case.get("distributed"))
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=bool(case.get("bf16")),
        use_distributed_optimizer=distributed,
        overlap_grad_reduce=distributed,
        overlap_param_gather=distributed,
        bucket_size=4000 if distributed else None,
    )
    chunks = []
    for stage in range(case["vp"] or 1):
        vp_stage = stage if case["vp"] else None
        model = GPTModel(
            config,
            spec,
            VOCAB,
            LONGEST,
            pre_process=ps.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            position_embedding_type=case.get("positions", "rope"),
            vp_stage=vp_stage,
        )
        if case.get("bf16"):
            model = Float16Module(config, model)
        chunks.append(DistributedDataParallel(config, ddp, model, disable_bucketing=stage > 0))
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=3e-3,
            bf16=bool(case.get("bf16")),
            params_dtype=torch.bfloat16 if case.get("bf16") else torch.float32,
            use_distributed_optimizer=distributed,
            overlap_param_gather=distributed,
            clip_grad=0.5,
        ),
        chunks,
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    many = len(chunks) > 1
    config.no_sync_func = [c.no_sync for c in chunks] if many else chunks[0].no_sync
    if distributed:
        config.param_sync_func = (
            [c.start_param_sync for c in chunks] if many else chunks[0].start_param_sync
        )
    return chunks, optimizer, config


def mean_loss(reports: list[dict[str, Tensor]]) -> float:
    """The step's loss on every process, as train_step computes it."""
    from megatron.core import parallel_state as ps

    total = torch.zeros(2, dtype=torch.float64)
    if ps.is_pipeline_last_stage(ignore_virtual=True):
        total = torch.stack([r["lm loss"].double() for r in reports]).sum(0)
        dist.all_reduce(total, group=ps.get_data_parallel_group(with_context_parallel=True))
    dist.broadcast(
        total, ps.get_pipeline_model_parallel_last_rank(),
        group=ps.get_pipeline_model_parallel_group(),
    )  # fmt: skip
    return float(total[0] / total[1])


def _files(case: dict[str, Any]) -> Any:
    """The case's data set on files, or None."""
    if "data" not in case:
        return None
    make = {"indexed": megatron_data.indexed, "chats": megatron_data.chats}[case["data"]]
    return make(case["folder"], case["steps"] * SAMPLES)


def _rows(
    case: dict[str, Any], files: Any, step: int, replica: int, count: int, planned: bool
) -> list[Any]:
    """Rows of a data set on files; the static run gets each sample of them by itself."""
    first = step * SAMPLES + replica * count
    rows = [megatron_data.collated(files[first + i]) for i in range(count)]
    if planned:
        return rows
    samples = [s for row in rows for s in megatron_data.splitter(case["data"]).samples(row)]
    of = megatron_data.sources(case["data"], files)
    assert all(megatron_data.stays_inside(s["tokens"].tolist(), of) for s in samples)
    return [{name: x[None] for name, x in s.items()} for s in samples]


def items_of(case: dict[str, Any], step: int, replica: int, count: int) -> Iterable[Any]:
    """The items of one data-parallel rank; `fault` spoils those of the last one.

    Or those of the last context or pipeline rank, which holds the same items as the others.
    """
    from megatron.core import parallel_state as ps

    multiple = case["tp"] if case.get("model", {}).get("sequence_parallel") else 1
    items: list[Any] = [sample(step, replica * count + i, multiple) for i in range(count)]
    early = step < case.get("fault_step", 0)
    fault = None if replica != 1 or early else case.get("fault")
    if fault == "fraction":
        items[0]["loss_mask"] = items[0]["loss_mask"] * 0.5
    elif fault == "end":
        items.pop()
    elif fault == "lengths":
        items[0] = {"pixels": torch.zeros(1, 4)}
    elif fault == "loader":
        return _broken(items)
    if case.get("fault") == "context" and ps.get_context_parallel_rank() == 1:
        return _broken(items)
    if case.get("fault") == "stage" and ps.get_pipeline_model_parallel_rank() == 1:
        items[0] = sample(step + 1000, 0, multiple)
    return items


def _broken(items: list[Any]) -> Iterator[Any]:
    """A loader whose disk fails after the first item."""
    yield items[0]
    raise OSError("the disk is gone")


def train(
    case: dict[str, Any],
    planned: bool,
    state: dict[str, Any] | None = None,
    begun: list[int] | None = None,
) -> dict[str, Any]:
    """Train up to the case's number of steps, from the start or from the state of another run.

    begun: gets the number of each step that Megatron's own schedule has begun.
    """
    from megatron.core import parallel_state as ps
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_dcp.adapters.megatron.runner import MegatronDcp

    chunks, optimizer, _ = build(case, planned)
    schedule: Callable[..., Any] = get_forward_backward_func()
    if begun is not None:
        schedule = _counted(schedule, begun)
    dcp = None
    if planned:
        strategy = case.get("strategy") or register_mix()
        dcp = MegatronDcp(
            planner=PlannerConfig(
                strategy=strategy,
                memory_gb=case.get("memory_gb", 64.0),
                oversize=case.get("oversize", "error"),
                cost=case.get("cost", "auto"),
            ),
            megatron=MegatronConfig(**case.get("options", {})),
        )
        if "data" in case:
            dcp.reader = megatron_data.splitter(case["data"]).samples
        schedule = dcp.wrap(schedule)
    if state is not None:
        megatron_experts.restore(state, chunks, optimizer, dcp)
    lagged = None
    if not planned and megatron_experts.uses_global_loss(case):
        lagged = megatron_experts.LaggedLoss(chunks)
    # Without CP ranks the static run spreads the samples over all data ranks.
    with_cp = not planned
    replicas = ps.get_data_parallel_world_size(with_context_parallel=with_cp)
    replica = ps.get_data_parallel_rank(with_context_parallel=with_cp)
    count = SAMPLES // replicas
    files = _files(case)
    losses, norms, sizes = [], [], []
    degrees: set[int] = set()
    for step in range(0 if state is None else state["mdcp"]["steps"], case["steps"]):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        if files is None:
            items = items_of(case, step, replica, count)
        else:
            items = _rows(case, files, step, replica, count, planned)
        # A row of a file may hold several samples, each a microbatch of the static run.
        microbatches = count if files is None else len(items)
        data: Any = [iter(items) for _ in chunks] if len(chunks) > 1 else iter(items)
        reports = schedule(
            forward_step_func=FORWARDS[case.get("forward", "static")],
            data_iterator=data,
            model=chunks,
            num_microbatches=microbatches,
            seq_length=LONGEST,
            micro_batch_size=1,
            forward_only=False,
        )
        if lagged is not None:
            lagged.end()
        _, norm, _ = optimizer.step()
        losses.append(mean_loss(reports))
        norms.append(float(norm))
        sizes.append(len(reports))
        if dcp is not None and dcp.last_plan is not None:
            degrees |= {p.degree for p in dcp.last_plan.placements}
    result = {"losses": losses, "norms": norms, "microbatches": sizes}
    if dcp is not None:
        assert dcp.last_plan is not None
        result["digests"] = dcp.digests
        result["all_degrees"] = sorted(degrees)
        result["communicators"] = dcp.communicators
        if case.get("keep"):
            result["state"] = megatron_experts.keep(chunks, optimizer, dcp)
    return result


def _counted(schedule: Callable[..., Any], begun: list[int]) -> Callable[..., Any]:
    @wraps(schedule)
    def counted(**kwargs: Any) -> Any:
        begun.append(len(begun))
        return schedule(**kwargs)

    return counted


def compare(**case: Any) -> dict[str, Any]:
    """Train the static and the planned run of a case on this rank; returns both histories."""
    standins.install(training=False)
    import megatron.core
    from megatron.core import parallel_state as ps

    case = {**ONE_RANK, "steps": 20, **case}
    out: dict[str, Any] = {"version": megatron.core.__version__}
    for planned in (False, True):
        ps.initialize_model_parallel(**grid_of(case if planned else {**case, "cp": 1}))
        try:
            out["planned" if planned else "static"] = train(case, planned)
        finally:
            ps.destroy_model_parallel()
    return out


def grid_of(case: dict[str, Any]) -> dict[str, Any]:
    """Arguments of initialize_model_parallel of a planned run."""
    return {
        "tensor_model_parallel_size": case["tp"],
        "pipeline_model_parallel_size": case["pp"],
        "virtual_pipeline_model_parallel_size": case["vp"],
        "expert_model_parallel_size": case["ep"],
        "context_parallel_size": case["cp"],
        "expert_tensor_parallel_size": case.get("etp"),
    }
