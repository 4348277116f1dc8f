"""A small megatron-core GPT in its own schedule, one optimizer step at a time.

What `mdcp bench end-to-end --trainer megatron` trains: GPTModel in Megatron's DDP with its
optimizer, `get_forward_backward_func` wrapped by `MegatronDcp`. Import after the stand-ins are in
place (`start`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_dcp.adapters.megatron import standins
from megatron_dcp.adapters.megatron.attention import packed_params, plan_aware_spec
from megatron_dcp.adapters.megatron.microbatch import gpt_forward_step, sum_loss
from megatron_dcp.adapters.megatron.recompute import Recompute
from megatron_dcp.adapters.megatron.runner import MegatronDcp
from megatron_dcp.config import PlannerConfig
from megatron_dcp.cost import ModelShape
from megatron_dcp.dist import DataWorld, LinkPacer, PlacementContext, gather_bytes
from megatron_dcp.runtime.contender import StepRun
from megatron_dcp.runtime.eventlog import EventLog, now_us


def start() -> str:
    """Stand-ins where there is no GPU, and Megatron's groups: all ranks data-parallel. Returns the
    version of megatron-core."""
    if not standins.gpu_present():
        standins.install(training=False)
    import megatron.core
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    return str(megatron.core.__version__)


def small_gpt(shape: ModelShape, ffn: int, *, max_length: int, seed: int) -> Any:
    """A plan-aware GPTModel of a shape: RMSNorm, SwiGLU, RoPE; weights drawn with `seed`."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)  # Megatron draws weights from a state of its own
    config = TransformerConfig(
        num_layers=shape.layers, hidden_size=shape.hidden, num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads, ffn_hidden_size=ffn, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, add_bias_linear=False, normalization="RMSNorm",
        hidden_dropout=0.0, attention_dropout=0.0, calculate_per_token_loss=True,
        masked_softmax_fusion=False, gradient_accumulation_fusion=False, bias_dropout_fusion=False,
        persist_layer_norm=False,
    )  # fmt: skip
    spec = plan_aware_spec(get_gpt_layer_local_spec(normalization="RMSNorm"))
    return GPTModel(config, spec, shape.vocab, max_length, position_embedding_type="rope")


def run_pack(model: Any, context: PlacementContext, recompute: int) -> None:
    """Forward and backward of one rank's share of a placement, on random tokens."""
    ids = torch.randint(0, model.vocab_size, (1, context.rows))
    settings = Recompute.of(model, model.config)
    settings.apply(recompute, "layers", model.config.num_layers)
    try:
        losses = model(
            ids, context.position_ids[None], None, labels=ids,
            packed_seq_params=packed_params(context, context.rows),
        )  # fmt: skip
        losses.sum().backward()
    finally:
        settings.restore()
    model.zero_grad(set_to_none=True)


class SmallMegatron:
    """A contender. corpus: samples with `lengths`; the batches are drawn with `seed`.

    cost: file of the profile. model: from `small_gpt`, trained in place.
    """

    def __init__(
        self,
        name: str,
        model: Any,
        corpus: Any,
        *,
        cost: str,
        global_batch: int,
        seed: int,
        lr: float,
        bytes_per_s: float | None,
    ) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.name, self.corpus, self.batch, self.seed = name, corpus, global_batch, seed
        config = model.config
        self.model = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer="adam", lr=lr, weight_decay=0.1, clip_grad=0.0), [self.model]
        )
        self._finalize: Callable[..., Any] = finalize_model_grads
        config.finalize_model_grads_func = self._reduce
        config.no_sync_func = self.model.no_sync
        self.dcp = MegatronDcp(
            planner=PlannerConfig(strategy=name, cost=cost), forward_step=self._forward_step
        )
        self._schedule = self.dcp.wrap(get_forward_backward_func())
        self.dcp._prepare([self.model])
        assert self.dcp._domain is not None
        self.world: DataWorld = self.dcp._domain.world
        self.world.wire.pacer = None if bytes_per_s is None else LinkPacer(bytes_per_s)
        self.log = EventLog(self.world, measure=True)
        self._step = 0
        self._began = 0  # when this rank's first microbatch began: planning is not the step

    def _items(self) -> Iterator[dict[str, Tensor]]:
        """This rank's samples of the step, as a data loader gives them."""
        epoch, at = divmod(self._step * self.batch, len(self.corpus) - self.batch)
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.corpus))
        for i in order[at : at + self.batch][self.world.rank :: self.world.size]:
            ids = torch.from_numpy(self.corpus[int(i)])[None]
            yield {"tokens": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous(),
                   "loss_mask": torch.ones(1, ids.shape[1] - 1),
                   "position_ids": torch.arange(ids.shape[1] - 1)[None]}  # fmt: skip

    def _forward_step(self, iterator: Any, model: Any) -> Any:
        """GPT's, after the ranks of the block have met: waiting is not communication."""
        mb = iterator.peek()
        if not self._began:
            self.world.rendezvous(0, self.world.size)
            self._began = self.log.begin_step()
        p = mb.context.placement
        if p.degree > 1:
            with self._timed("wait"):
                self.world.rendezvous(p.first_rank, p.degree)
        return gpt_forward_step(sum_loss, iterator, model)

    def _reduce(self, *args: Any, **kwargs: Any) -> None:
        with self._timed("wait"):
            self.world.rendezvous(0, self.world.size)
        with self._timed("reduce"):
            self._finalize(*args, **kwargs)

    @contextmanager
    def _timed(self, kind: str) -> Iterator[None]:
        begin = now_us()
        yield
        self.log.add(kind, begin, now_us())

    def run_step(self) -> StepRun:
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.log.step, self._began = self._step, 0
        reports = self._schedule(
            forward_step_func=None, data_iterator=self._items(), model=[self.model],
            num_microbatches=self.batch // self.world.size, seq_length=1, micro_batch_size=1,
            forward_only=False,
        )  # fmt: skip
        with self._timed("optimizer"):
            self.optimizer.step()
        plan = self.dcp.last_plan
        assert plan is not None
        self.log.end_step(self._began, tokens=plan.workload.tokens)
        self._step += 1
        return StepRun(
            plan=plan, loss=self._loss(reports), events=self._take(),
            planner_ms=plan.info["planner_us"] / 1e3,
        )  # fmt: skip

    def _take(self) -> list[dict[str, Any]]:
        """The step's events: what moved the samples before it is not among them."""
        return [e for e in self.log.take() if e["start_us"] >= self._began]

    def _loss(self, reports: list[dict[str, Tensor]]) -> float:
        """Token mean over the step, on every rank."""
        mine = torch.stack([r["lm loss"].double() for r in reports]).sum(0)
        told = [np.frombuffer(b) for b in gather_bytes(self.world, mine.numpy().tobytes())]
        total = np.sum(told, axis=0)
        return float(total[0] / total[1])

    def close(self) -> None:
        self.world.close()
