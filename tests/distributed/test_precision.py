"""Low precision: bfloat16 autocast, float32 accumulation, loss scaling, unused parameters, EMA."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_dcp as mdcp
from megatron_dcp.errors import ConfigError
from megatron_dcp.testing.cases.gradients import Samples, random_lengths, run_step
from megatron_dcp.testing.models import TinyModel
from megatron_dcp.testing.plans import tiny_profile
from megatron_dcp.testing.pool import WorkerPool

CASES = "megatron_dcp.testing.cases.precision"

# bfloat16 rounds to nearest with a relative error of at most u = 2^-8. Under autocast a product
# rounds both factors and its result; a layer of the tiny model has 4 products and 4 roundings more
# around attention (q, k, v, out): 16. Two layers and the head make 35 on the way to the loss, and
# as many on the way back. As independent errors of either sign they add up like a random walk, to
# at most sqrt(70) u of a gradient's norm.
ROUNDINGS = 2 * (2 * (4 * 3 + 4) + 3)
TOLERANCE = math.sqrt(ROUNDINGS) * 2.0**-8


@pytest.mark.parametrize("wrapper", ["bare", "ddp", "fsdp2"])
def test_bfloat16_autocast_gradients(pool: WorkerPool, wrapper: str) -> None:
    """Within the derived tolerance of float64, and no plan adds to what bfloat16 itself costs."""
    for seed in (2, 3):
        alone = pool.run(1, f"{CASES}:autocast_case", seed=seed)[0]["errors"]
        for r in pool.run(2, f"{CASES}:autocast_case", seed=seed, wrapper=wrapper):
            assert r["dtypes"] == ["torch.float32"]
            assert max(r["errors"].values()) <= TOLERANCE
            assert max(r["errors"].values()) <= 1.5 * max(alone.values())
            assert r["loss_error"] <= 2.0**-8


@pytest.mark.parametrize("wrapper", ["bare", "ddp"])
def test_bfloat16_gradients_are_accumulated_in_float32(pool: WorkerPool, wrapper: str) -> None:
    """256 + 1 is 256 in bfloat16: 32 microbatches of it lose a tenth of this gradient."""
    case = f"{CASES}:accumulation_case"
    for r in pool.run(2, case, wrapper=wrapper, float32=True):
        assert r["microbatches"] == 32
        assert r["dtype"] == "torch.bfloat16", "what the optimizer gets"
        assert r["gradient"] == pytest.approx([r["exact"]] * 4, rel=2.0**-8)
    for r in pool.run(2, case, wrapper=wrapper, float32=False):
        assert r["gradient"][0] < 0.95 * r["exact"]


@pytest.mark.parametrize("backend", ["bare", "ddp", "fsdp2", "fsdp2-keep"])
def test_a_dry_run_leaves_nothing_in_the_first_step(pool: WorkerPool, backend: str) -> None:
    options = {"wrapper": backend.partition("-")[0]}
    if backend == "fsdp2-keep":
        options["backend"] = backend
    case = f"{CASES}:dry_run_case"
    dry = pool.run(2, case, dry=True, **options)
    assert dry == pool.run(2, case, dry=False, **options)
    assert dry[0]["backend"] == backend


@pytest.mark.parametrize(
    "options", [{}, {"wrapper": "ddp"}, {"idle_rank": True, "lockstep": "all"}]
)
def test_parameters_that_nobody_used_have_no_gradient(
    pool: WorkerPool, options: dict[str, Any]
) -> None:
    """As in one process: weight decay leaves them alone. One that a rank used is summed."""
    for r in pool.run(2, f"{CASES}:unused_case", **options):
        assert r["gradients"]["never"] is None
        assert r["gradients"]["some"] > 0
        assert r["never"] == [1.0, 1.0]


@pytest.mark.parametrize("wrapper", ["bare", "ddp", "fsdp2"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(pool: WorkerPool, wrapper: str) -> None:
    results = pool.run(2, f"{CASES}:scaler_case", wrapper=wrapper, overflow_rank=1)
    assert results[0]["losses"] == results[1]["losses"]
    for r in results:
        assert r["skipped"] == [0, 1, 0]
        assert r["moved"] == [True, False, True]
        assert r["scales"] == [1024.0, 512.0, 512.0]
        assert r["rate"] == pytest.approx(0.1 / 3), "the scheduler did not step either"


@pytest.mark.parametrize("planes", [[[0], [1]], [[0, 1], [2, 3]], [[0, 2], [1, 3]]])
def test_an_overflow_in_one_plane_skips_the_step_in_all(
    pool: WorkerPool, planes: list[list[int]]
) -> None:
    ranks = sum(map(len, planes))
    case = f"{CASES}:scaler_case"
    for r in pool.run(ranks, case, wrapper="bare", overflow_rank=ranks - 1, planes=planes):
        assert r["skipped"] == [0, 1, 0]
        assert r["moved"] == [True, False, True]
        assert r["scales"] == [1024.0, 512.0, 512.0]


def test_scaled_steps_are_those_without_a_scaler(pool: WorkerPool) -> None:
    """Scale 1024 is divided out before clipping: the same norms on any wrapper and any ranks."""
    case = f"{CASES}:scaler_case"
    alone = pool.run(1, case, wrapper="bare", overflow_rank=None)[0]
    for wrapper in ("ddp", "fsdp2"):
        r = pool.run(2, case, wrapper=wrapper, overflow_rank=None)[0]
        for name in ("losses", "norms", "ema", "parameters"):
            assert r[name] == pytest.approx(alone[name], rel=1e-5), (wrapper, name)


def start(optimizer: bool = True, **options: Any) -> tuple[Any, Any]:
    model = TinyModel(seed=0, dtype=torch.float32)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) if optimizer else None
    engine = mdcp.initialize(model, sgd, cost=tiny_profile(), plan_ahead=0, **options)
    data = Samples(random_lengths(0, 24, 20), 0)
    return engine, engine.dataloader(data, global_batch_size=6, lengths="lengths")


def test_the_average_follows_its_formula_and_is_lent_for_evaluation() -> None:
    engine, loader = start(ema_decay=0.75)
    name, p = next(engine.model.named_parameters())
    expected = p.detach().clone()
    for step in loader:
        run_step(engine, step)
        expected = 0.75 * expected + 0.25 * p.detach()
    torch.testing.assert_close(engine.ema.average[name], expected)
    trained = p.detach().clone()
    with engine.ema.applied():
        torch.testing.assert_close(p.detach(), expected)
    assert torch.equal(p, trained)


@pytest.mark.parametrize("backend", ["fsdp2", "fsdp2-keep"])
def test_evaluations_leave_no_gathered_parameters_behind(
    pool: WorkerPool, tmp_path: Path, backend: str
) -> None:
    """FSDP2 keeps gathered what a forward without backward used: averages, or what came before."""
    case = f"{CASES}:evaluation_case"

    def run(ranks: int, name: str, **options: Any) -> dict[str, list[float]]:
        found: dict[str, list[float]] = pool.run(
            ranks, case, directory=str(tmp_path / name), **options
        )[0]
        return found

    alone = run(1, "alone", wrapper="bare")
    plain = run(1, "plain", wrapper="bare", evaluate=False)
    assert alone["losses"] == plain["losses"]
    assert plain["losses"][3] == plain["losses"][1], "the step after the checkpoint"
    found = run(2, "sharded", wrapper="fsdp2", backend=backend)
    assert len(found["evaluated"]) == 9
    for name in ("losses", "evaluated"):
        assert found[name] == pytest.approx(alone[name], rel=1e-9), name


def test_average_and_scale_are_resumed(tmp_path: Path) -> None:
    from megatron_dcp.runtime.checkpoint import load_checkpoint, save_checkpoint

    def made() -> tuple[Any, Any]:
        return start(ema_decay=0.75, scaler=torch.amp.GradScaler("cpu", growth_interval=2))

    engine, loader = made()
    for _ in range(2):
        run_step(engine, next(iter(loader)))
    save_checkpoint(engine, loader, tmp_path)
    other, its_loader = made()
    load_checkpoint(other, its_loader, tmp_path)
    assert other.scaler.get_scale() == engine.scaler.get_scale() == 2 * 65536.0
    for a, b in zip(engine.ema.average.values(), other.ema.average.values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", ["milestones", "sequence"])
def test_a_schedule_by_step_numbers_is_resumed(tmp_path: Path, kind: str) -> None:
    """Its state counts milestones by number, and JSON has strings for keys only."""
    from torch.optim.lr_scheduler import LinearLR, MultiStepLR, SequentialLR

    from megatron_dcp.runtime.checkpoint import load_checkpoint, save_checkpoint

    def made() -> tuple[Any, Any]:
        model = TinyModel()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler: Any = MultiStepLR(optimizer, [3, 3, 4], 0.5)
        if kind == "sequence":
            scheduler = SequentialLR(optimizer, [LinearLR(optimizer), scheduler], [1])
        engine = mdcp.initialize(model, optimizer, scheduler=scheduler, cost=tiny_profile())
        data = Samples(random_lengths(0, 12, 20), 0)
        return engine, engine.dataloader(data, global_batch_size=2, lengths="lengths", epochs=2)

    def rates(engine: Any, loader: Any, steps: int) -> list[float]:
        out = []
        for _ in range(steps):
            run_step(engine, next(iter(loader)))
            out.append(engine.optimizer.param_groups[0]["lr"])
        return out

    straight = rates(*made(), 6)
    engine, loader = made()
    first = rates(engine, loader, 2)
    save_checkpoint(engine, loader, tmp_path)
    engine, loader = made()
    load_checkpoint(engine, loader, tmp_path)
    assert first + rates(engine, loader, 4) == straight
    assert len(set(straight)) > 2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"scaler": torch.amp.GradScaler("cpu"), "optimizer": False}, "needs the optimizer"),
        ({"ema_decay": 1.0}, "below 1"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        start(**options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_scaler_refuses_parameters_that_it_cannot_unscale(dtype: torch.dtype) -> None:
    """Frozen ones have no gradients: of any type, and in no param group, they are fine."""
    model = TinyModel(dtype=torch.float32)
    model.head.to(dtype).requires_grad_(False)
    optimizer = torch.optim.SGD(model.layers.parameters(), lr=0.1)

    def make() -> Any:
        scaler = torch.amp.GradScaler("cpu")
        return mdcp.initialize(model, optimizer, cost=tiny_profile(), scaler=scaler)

    with pytest.raises(ConfigError, match=r"embedding\.weight is in no param group"):
        make()
    model.embedding.requires_grad_(False)
    assert make().scaler is not None
    optimizer.add_param_group({"params": list(model.head.requires_grad_().parameters())})
    with pytest.raises(ConfigError, match=rf"head\.weight is {str(dtype)[6:]}; keep"):
        make()
