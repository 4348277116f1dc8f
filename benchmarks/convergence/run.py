"""Train the same samples under several strategies and write the loss of every step.

    torchrun --nproc_per_node 2 benchmarks/convergence/run.py --out runs/convergence

One JSON file per variant (task, number type, strategy, seed, order of samples, loss weights); those
that exist are left alone, and a variant that SIGTERM ended goes on from its checkpoint, so the same
command continues a run. `report.py` makes table and figures.

Variants of each task: static, dcp, dcp-intra in float64, float32 and bfloat16 (autocast); static
with the samples of every step in reverse order in float32 (what rounding alone does); static with
two more seeds in bfloat16 (what another initialisation does); and, with --schedule-weights, the
three in float32 with the loss weights of the original DCP, which depend on the schedule (see
`schedule_weighted`).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import megatron_dcp as mdcp
from megatron_dcp.dist import DataWorld
from megatron_dcp.plan import StepPlan
from megatron_dcp.runtime.checkpoint import load_checkpoint, save_checkpoint

sys.path.insert(0, str(Path(__file__).parents[1]))
from convergence.tasks import TASKS, Task, cost_profile, named

STRATEGIES = ("static", "dcp", "dcp-intra")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One training. dtype: float64, float32 or bfloat16 (autocast, float32 parameters)."""

    task: str
    dtype: str
    strategy: str
    seed: int = 0
    reverse: bool = False
    schedule_weights: bool = False

    @property
    def name(self) -> str:
        marks = ["reversed"] * self.reverse + ["schedule-weights"] * self.schedule_weights
        return "_".join([self.task, self.dtype, self.strategy, f"seed{self.seed}", *marks])


def variants(task: str, dtypes: list[str], schedule_weights: bool) -> Iterator[Variant]:
    for dtype in dtypes:
        for strategy in STRATEGIES:
            yield Variant(task=task, dtype=dtype, strategy=strategy)
        if dtype == "float32":
            yield Variant(task=task, dtype=dtype, strategy="static", reverse=True)
        if dtype == "bfloat16":
            for seed in (1, 2):
                yield Variant(task=task, dtype=dtype, strategy="static", seed=seed)
    if schedule_weights:
        for strategy in STRATEGIES:
            yield Variant(task=task, dtype="float32", strategy=strategy, schedule_weights=True)


class Reversed:
    """A sampler whose steps hold the same samples in reverse order."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def indices(self, step: int) -> list[int]:
        return self._inner.indices(step)[::-1]


def schedule_weighted(mb: Any, loss_sum: Tensor, step: Any, ranks: int) -> Tensor:
    """The loss as the original DCP weighs it: NOT what this project does, shown for comparison.

    There each microbatch takes the mean over its own tokens, each rank the mean over its
    microbatches, and the reduction the mean over ranks: a token in a small microbatch, or on a rank
    with few, weighs more, so the schedule decides what is learnt from which sample.
    """
    local = float((mb.weights * (mb.labels != -100)).sum())
    count = sum(not m.dummy for m in step.microbatches)
    return loss_sum * (step.denominator / (max(local, 1.0) * count * ranks))


def train(variant: Variant, task: Task, steps: int, checkpoints: Path) -> dict[str, Any] | None:
    """Losses per step, and what the plans were; None when a signal ended it after a checkpoint."""
    dtype = torch.float64 if variant.dtype == "float64" else torch.float32
    torch.manual_seed(variant.seed)
    model = task.model().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.lr, weight_decay=0.1)
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min(1.0, (k + 1) / 20))
    world = DataWorld(timeout_s=300)
    engine = mdcp.initialize(
        model, optimizer, cost=cost_profile(task, world.size), strategy=variant.strategy,
        scheduler=warm, max_grad_norm=1.0, world=world,
    )  # fmt: skip
    loader = engine.dataloader(
        task.dataset(dtype), global_batch_size=task.batch, lengths="lengths", steps=steps,
        **task.loader,
    )  # fmt: skip
    if variant.reverse:
        loader.preparer.sampler = Reversed(loader.preparer.sampler)
    autocast: Any = contextlib.nullcontext()
    if variant.dtype == "bfloat16":
        autocast = torch.autocast("cpu", dtype=torch.bfloat16)
    engine.handle_preemption()
    done: dict[str, Any] = {"losses": [], "plans": [], "seconds": 0.0}
    if load_checkpoint(engine, loader, checkpoints):
        done = json.loads((checkpoints / "done.json").read_text())
    losses, plans, begin = done["losses"], done["plans"], time.perf_counter() - done["seconds"]
    for step in loader:
        exact = torch.zeros((), dtype=torch.float64)
        for mb in step:
            with autocast:
                loss_sum = task.loss_sum(model, mb, variant.seed)
            exact += loss_sum.detach().double() * (not mb.dummy)
            if variant.schedule_weights:
                loss_sum = schedule_weighted(mb, loss_sum, step, world.size)
            mb.backward(loss_sum)
        loss = step.finish()
        if variant.schedule_weights:  # the curve shows the same loss for everyone
            loss = float(world.wire.all_reduce(exact, world.group)) / step.denominator
        losses.append(loss)
        plans.append(described(step.plan))
        if engine.stop_requested:
            save_checkpoint(engine, loader, checkpoints)
            if world.rank == 0:
                done["seconds"] = time.perf_counter() - begin
                (checkpoints / "done.json").write_text(json.dumps(done))
            engine.close()
            return None
    engine.close()
    return {
        "variant": asdict(variant), "what": task.what, "ranks": world.size, "steps": steps,
        "batch": task.batch, "seconds": round(time.perf_counter() - begin, 1), "losses": losses,
        "plans": plans, "parameters": sum(p.numel() for p in model.parameters()),
    }  # fmt: skip


def described(plan: StepPlan) -> dict[str, Any]:
    """What a plan does, and a digest of it that leaves the strategy's name out."""
    rows = [
        (
            p.slot,
            p.first_rank,
            p.degree,
            p.scheme,
            p.recompute,
            [plan.lengths[i] for i in p.samples],
        )
        for p in plan.placements
    ]
    return {
        "digest": hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:12],
        "modes": dict(Counter(f"{p.scheme}:{p.degree}" for p in plan.placements)),
        "recomputed": sum(p.recompute > 0 for p in plan.placements),
        "tokens": plan.workload.tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/convergence"))
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--dtypes", default="float64,float32,bfloat16")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--schedule-weights", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    args.out.mkdir(parents=True, exist_ok=True)
    for task in named(args.tasks.split(",")):
        for variant in variants(task, args.dtypes.split(","), args.schedule_weights):
            path = args.out / f"{variant.name}.json"
            there = [path.exists()]
            if dist.is_initialized():
                dist.broadcast_object_list(there, 0)
            if there[0]:
                continue
            checkpoints = args.out / "checkpoints" / variant.name
            found = train(variant, TASKS[task], args.steps, checkpoints)
            if found is None:
                print(f"{variant.name}: stopped by a signal; the same command goes on", flush=True)
                return
            if rank == 0:
                path.write_text(json.dumps(found) + "\n")
                last = found["losses"][-1]
                print(f"{variant.name}: {found['seconds']} s, last loss {last:.6f}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
