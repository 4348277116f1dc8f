"""Faults that users of such systems reported; each has a test of its own, named after it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_dcp as mdcp
from megatron_dcp.cost import resolve
from megatron_dcp.data.generators import generate
from megatron_dcp.dist.context import cu_seqlens_of
from megatron_dcp.observe.timeline import draw_step
from megatron_dcp.plan import Topology, Workload, digest, dumps, load
from megatron_dcp.planner import PlanRequest, make_plan, strategy_names
from megatron_dcp.planner.oversize import most_bytes_needed
from megatron_dcp.testing.cases.gradients import Samples, random_lengths, run_step
from megatron_dcp.testing.models import TinyModel, weighted_loss_sum
from megatron_dcp.testing.plans import tiny_profile
from megatron_dcp.testing.pool import WorkerPool

GRADIENTS = "megatron_dcp.testing.cases.gradients:gradient_case"
LENGTHS = Path(__file__).parents[1] / "data" / "lengths"
TRAINING = "megatron_dcp.testing.cases.training:training_case"


def plan_for(lengths: list[int], ranks: int = 8, node: int = 8, **more: Any) -> Any:
    request = PlanRequest(
        workload=Workload(lengths=tuple(lengths)),
        topology=Topology(data_ranks=ranks, ranks_per_node=node),
        profile=resolve("a100-gpt7b"),
        **more,
    )
    return make_plan(request)


def test_01_unequal_microbatch_counts_deadlock_under_fsdp(pool: WorkerPool) -> None:
    results = pool.run(3, GRADIENTS, seed=5, wrapper="fsdp2", samples=7)
    assert all(r["error"] <= 1e-10 for r in results)
    assert len({r["microbatches"] for r in results}) == 1
    assert sum(r["dummies"] for r in results) > 0


def test_02_balancing_by_flops_breaks_the_token_cap() -> None:
    lengths, _ = generate("github-like", 256, 3)
    plan = plan_for([min(n, 300_000) for n in lengths], ranks=64)
    assert max(p.bytes for p in plan.placements) <= plan.budget_bytes == 28_672_000_000


@pytest.mark.parametrize(("samples", "ranks"), [(9, 4), (10, 4), (7, 6), (17, 8)])
def test_03_ceil_splitting_leaves_a_rank_without_samples(samples: int, ranks: int) -> None:
    plan = plan_for([4000] * samples, ranks=ranks, node=ranks)
    assert all(plan.of_rank(r) for r in range(ranks))


def test_04_wrong_loss_normalisation_with_dynamic_groups(pool: WorkerPool) -> None:
    for normalize in ("token", "sample"):
        for r in pool.run(4, GRADIENTS, seed=2, masked=0.6, normalize=normalize):
            assert r["error"] <= 1e-10
            assert r["loss_error"] <= 1e-12


def test_05_a_group_captured_at_construction(pool: WorkerPool) -> None:
    """One model goes through plans of changing degrees: as if it had been one rank all along."""
    alone = pool.run(1, TRAINING, seed=4, steps=4)[0]
    shared = pool.run(4, TRAINING, seed=4, steps=4)[0]
    assert shared["losses"] == pytest.approx(alone["losses"], rel=1e-9)
    assert shared["parameters"] == alone["parameters"]


def test_06_recompilation_storms_from_ever_changing_shapes() -> None:
    """Compiled layers see a new shape in every microbatch: no graph after those of the first."""
    from torch._dynamo.utils import counters

    model = TinyModel(seed=0)
    for layer in model.layers:
        layer.compile(backend="eager", dynamic=True)
    graphs = []
    for n in (7, 30, 12, 1, 44, 5):
        with mdcp.packed([n, 3]) as pack:
            out = model(torch.zeros(n + 3, dtype=torch.int64), pack.position_ids)
        torch.autograd.backward(out.sum())
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0
    assert graphs[-1] == graphs[0]


def test_07_communicators_eat_memory(pool: WorkerPool) -> None:
    """Random plans for 12 steps: few groups, no more than there are blocks."""
    for r in pool.run(4, TRAINING, seed=6, steps=12, batch=5):
        # The data group, and the all-to-all groups of 2, 3 and 4 neighbours that hold the rank.
        assert r["communicators"] <= 1 + 2 + 3 + 1


def test_07_groups_beyond_a_budget_go_and_come_back(pool: WorkerPool) -> None:
    """Two groups of a rank stay besides the data group; the least recently used one goes."""
    pair, pairs, whole = [[0, 2]], [[0, 2], [2, 2]], [[0, 4]]
    three, needs_three = [[1, 3]], [[0, 2], [0, 3], [0, 4]]
    steps = [pair, whole, pairs, three, pairs, whole, needs_three]
    case = "megatron_dcp.testing.cases.groups:group_budget_case"
    results = pool.run(4, case, budget=2, steps=steps)
    for r in results:
        assert [step["made"] for step in r] == [1, 1, 1, 1, 0, 1, 1]
        assert all(size == total for step in r for size, total in step["sums"])
        assert max(step["communicators"] for step in r[:-1]) <= 1 + 2
    assert results[0][-1]["communicators"] == 1 + 3, "what one step needs is there"


@pytest.mark.parametrize("ranks", [3, 6])
def test_08_rank_counts_that_are_not_powers_of_two(pool: WorkerPool, ranks: int) -> None:
    assert all(r["error"] <= 1e-10 for r in pool.run(ranks, GRADIENTS, seed=ranks, samples=8))


class _WithGrid(Samples):
    """Every token carries its own (sample, position) pair as a payload."""

    def __getitem__(self, index: int) -> Any:
        item = super().__getitem__(index)
        fields = dict(item) if isinstance(item, dict) else {"input_ids": item}
        n = self.lengths[index]
        fields["grid"] = torch.stack((torch.full((n,), index), torch.arange(n)), dim=1)
        return fields


def test_09_payloads_left_behind_when_samples_are_rerouted() -> None:
    data = _WithGrid(random_lengths(1, 12, 30), 1)
    engine = mdcp.initialize(TinyModel(), None, cost=tiny_profile(), plan_ahead=0)
    step = next(iter(engine.dataloader(data, global_batch_size=12, lengths="lengths")))
    seen = 0
    for mb in step.microbatches:
        grid = mb.inputs["grid"]
        assert torch.equal(grid[:, 0], mb.context.sample_ids)
        assert torch.equal(grid[:, 1], mb.position_ids)
        seen += len(grid)
    assert seen == sum(data.lengths)


def test_10_a_rare_large_bucket_runs_out_of_memory_hours_in() -> None:
    """The heaviest step that could come is run at the start, and leaves no trace."""
    lengths = [5] * 60 + [200, 190, 180]
    data = Samples(lengths, 0)
    model = TinyModel(seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = mdcp.initialize(model, optimizer, cost=tiny_profile(), plan_ahead=0)
    loader = engine.dataloader(data, global_batch_size=3, lengths="lengths", steps=2)
    before = [p.detach().clone() for p in model.parameters()]
    seen: list[int] = []

    def loss(mb: Any) -> torch.Tensor:
        seen.append(mb.tokens)
        return weighted_loss_sum(model(**mb.inputs), mb.labels, mb.weights)

    loader.dry_run(loss)
    assert sum(seen) == 200 + 190 + 180
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert not optimizer.state
    assert loader.position == 0
    assert math.isfinite(run_step(engine, next(iter(loader))))


def test_11_a_planner_slower_than_the_step() -> None:
    """512 samples on 64 ranks: far below the step; `mdcp bench planner` checks the bars."""
    lengths = [int(x) for x in (LENGTHS / "wiki_512.txt").read_text().split()]
    best = min(plan_for(lengths, ranks=64).info["planner_us"] for _ in range(5))
    assert best < 0.1 * plan_for(lengths, ranks=64).makespan_us


def test_12_how_was_each_iteration_split(tmp_path: Path) -> None:
    """Every step's plan can be written, read, compared by digest, and drawn over what happened."""
    data = Samples(random_lengths(1, 12, 30), 1)
    engine = mdcp.initialize(
        TinyModel(), None, cost=tiny_profile(), plan_ahead=0, measure=True, recompute="off"
    )
    step = next(iter(engine.dataloader(data, global_batch_size=12, lengths="lengths")))
    run_step(engine, step)
    (tmp_path / "plan.json").write_text(dumps(step.plan))
    read = load(tmp_path / "plan.json")
    assert digest(read) == digest(step.plan)
    split = {i: p.degree for p in read.placements for i in p.samples}
    assert sorted(split) == list(range(12))
    events = engine.take_events()
    assert [e["kind"] for e in events].count("placement") == len(read.placements)
    picture = draw_step(read, events, tmp_path / "step.png", "step 0")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_13_empty_or_length_1_samples_give_nan(pool: WorkerPool) -> None:
    data = Samples([1, 1, 6, 1], 0)
    model = TinyModel(seed=0)
    engine = mdcp.initialize(model, None, cost=tiny_profile(), plan_ahead=0)
    step = next(iter(engine.dataloader(data, global_batch_size=4, lengths="lengths")))
    assert math.isfinite(run_step(engine, step))
    assert all(bool(torch.isfinite(p.grad).all()) for p in model.parameters() if p.grad is not None)
    with pytest.raises(mdcp.ConfigError, match="length 0"):
        engine.dataloader(data, global_batch_size=4, lengths=[1, 0, 6, 1])


def test_13_a_step_of_samples_without_any_label(pool: WorkerPool) -> None:
    for r in pool.run(2, GRADIENTS, seed=1, samples=4, longest=1):
        assert r["error"] == 0.0
        assert r["loss"] == 0.0


def test_14_int32_overflow_of_cu_seqlens() -> None:
    small, large = cu_seqlens_of([5, 7]), cu_seqlens_of([2**31 - 5, 4, 9])
    assert small.dtype == torch.int32
    assert large.dtype == torch.int64
    assert large.tolist() == [0, 2**31 - 5, 2**31 - 1, 2**31 + 8]


@pytest.mark.parametrize("strategy", [s for s in strategy_names() if s != "flexsp"])
def test_15_features_that_rot_because_nothing_runs_them(pool: WorkerPool, strategy: str) -> None:
    """Every strategy of the registry trains two ranks to the same losses."""
    alone = pool.run(1, TRAINING, seed=9, steps=2)[0]
    found = pool.run(2, TRAINING, seed=9, steps=2, strategy=strategy)[0]
    assert found["losses"] == pytest.approx(alone["losses"], rel=1e-9)


def test_a_sample_that_fits_nowhere_is_named_with_what_it_needs() -> None:
    request = PlanRequest(
        workload=Workload(lengths=(10, 900_000)),
        topology=Topology(data_ranks=8, ranks_per_node=8),
        profile=resolve("a100-gpt7b"),
    )
    needed = most_bytes_needed(request.cost, 900_000, recompute=True)
    with pytest.raises(mdcp.PlanError) as caught:
        make_plan(request)
    assert "sample 1" in str(caught.value)
    assert "900000" in str(caught.value)
    assert str(needed) in str(caught.value)
