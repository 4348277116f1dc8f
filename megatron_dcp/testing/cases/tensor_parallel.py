"""FSDP2 and tensor parallelism over one DeviceMesh, under random plans, against one process."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import megatron_dcp as mdcp
from megatron_dcp.dist import DataWorld
from megatron_dcp.schemes import attention
from megatron_dcp.testing.cases.backends import random_plans
from megatron_dcp.testing.cases.gradients import (
    Samples,
    random_lengths,
    reference_step,
    run_step,
    whole_gradients,
)
from megatron_dcp.testing.gradients import gradient_error
from megatron_dcp.testing.models import Attend, rotate
from megatron_dcp.testing.plans import tiny_profile

HIDDEN, HEADS, KV_HEADS, VOCAB = 32, 4, 2, 64
DIM = HIDDEN // HEADS
TP_RANKS = 2


class Layer(nn.Module):
    """A decoder layer with a linear of its own for q, k and v, as tensor parallelism cuts them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.q = nn.Linear(HIDDEN, HEADS * DIM)
        self.k = nn.Linear(HIDDEN, KV_HEADS * DIM)
        self.v = nn.Linear(HIDDEN, KV_HEADS * DIM)
        self.o = nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        y = self.norm(x)
        q, k, v = (f(y).view(len(y), -1, DIM) for f in (self.q, self.k, self.v))
        out = attend(rotate(q, position_ids), rotate(k, position_ids), v)
        x = x + self.o(out.flatten(1))
        out_: Tensor = x + self.down(nn.functional.gelu(self.up(self.mlp_norm(x))))
        return out_


class Model(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCAB)
        self.double()

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, attend: Attend = attention
    ) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x, position_ids, attend)
        logits: Tensor = self.head(x)
        return logits


def tensor_parallel_case(*, seed: int, samples: int = 9) -> dict[str, Any]:
    """Gradient error of one step on a mesh of data ranks x 2 tensor ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size // TP_RANKS, TP_RANKS), mesh_dim_names=("data", "tensor"))
    data = Samples(random_lengths(seed, samples), seed)
    model = Model(seed)
    reference = copy.deepcopy(model)
    cuts = {n: ColwiseParallel() for n in ("q", "k", "v", "up")}
    for layer in model.layers:
        parallelize_module(
            layer, mesh["tensor"], {**cuts, "o": RowwiseParallel(), "down": RowwiseParallel()}
        )
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    # A plane for each tensor rank: the same samples, the same plan, other heads.
    planes = mesh.mesh.T.tolist()
    engine = mdcp.initialize(
        model, None, cost=tiny_profile(heads=HEADS // TP_RANKS, kv_heads=KV_HEADS // TP_RANKS),
        plan_fn=random_plans(seed, False), plan_ahead=0, world=DataWorld(planes=planes),
    )  # fmt: skip
    loader = engine.dataloader(data, global_batch_size=samples, lengths="lengths", seed=seed)
    step = next(iter(loader))
    loss = run_step(engine, step)
    expected, grads = reference_step(reference, data, step.indices, "token")
    found = whole_gradients(model)
    error, where = gradient_error(found, grads)
    result = {
        "error": error,
        "where": where,
        "loss_error": abs(loss - expected) / abs(expected),
        "backend": engine.backend.name,
        "data_ranks": engine.world.size,
        "degrees": sorted({mb.placement.degree for mb in step.microbatches if not mb.dummy}),
    }
    engine.close()
    return result
