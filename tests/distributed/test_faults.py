"""Soak, and faults that no other file has: see docs/reliability.md for the whole table."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch

import megatron_dcp as mdcp
from megatron_dcp.errors import NonFiniteLossError, PlanError
from megatron_dcp.plan import canonical_bytes, dumps, loads
from megatron_dcp.testing.cases.gradients import Samples, random_lengths
from megatron_dcp.testing.models import TinyModel, weighted_loss_sum
from megatron_dcp.testing.plans import plan_request, random_plan, tiny_profile
from megatron_dcp.testing.pool import WorkerPool

SOAK = "megatron_dcp.testing.cases.soak:soak_case"


def soak(pool: WorkerPool, steps: int, warm_up: int) -> None:
    for rank, r in enumerate(pool.run(4, SOAK, steps=steps, warm_up=warm_up)):
        warm, end = r["warm"], r["end"]
        print(f"rank {rank}: after {warm_up} steps {warm}, after {steps} steps {end}")
        assert all(math.isfinite(x) for x in r["losses"])
        assert end["descriptors"] <= warm["descriptors"]
        assert end["communicators"] <= warm["communicators"] + 1  # a block not seen before
        assert end["threads"] <= warm["threads"]
        assert end["tensors"] <= warm["tensors"] + 50
        assert end["resident_kib"] <= warm["resident_kib"] * 1.05


def test_soak_200_steps(pool: WorkerPool) -> None:
    soak(pool, 200, 60)


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_soak_2000_steps() -> None:
    workers = WorkerPool(timeout_s=2900)
    try:
        soak(workers, 2000, 200)
    finally:
        workers.close()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_rank_killed_before_or_after_the_messages_of_a_step(when: str) -> None:
    """The ranks that are left end with a named error, after the steps that all have finished."""
    workers = WorkerPool(timeout_s=120)
    case = "megatron_dcp.testing.cases.faults:killed_in_a_step"
    results = workers.run(2, case, may_die=[1], when=when, victim=1)
    assert results[1] is None
    assert results[0]["done"] == 1
    assert "a transfer with rank 1 failed" in results[0]["error"]
    assert results[0]["seconds"] < 60


def test_a_nan_loss_names_the_sample_and_steps_no_optimizer() -> None:
    data = Samples(random_lengths(3, 8, 20), 3)
    model = TinyModel(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = mdcp.initialize(model, optimizer, cost=tiny_profile(), plan_ahead=0)
    step = next(iter(engine.dataloader(data, global_batch_size=8, lengths="lengths")))
    before = [p.detach().clone() for p in model.parameters()]
    first = step.microbatches[0]
    named = [step.indices[i] for i in first.placement.samples]
    for mb in step:
        loss = weighted_loss_sum(model(**mb.inputs), mb.labels, mb.weights)
        mb.backward(loss * math.nan if mb is first else loss)
    with pytest.raises(NonFiniteLossError) as caught:
        step.finish()
    assert str(named) in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def damaged_plans(cases: int) -> None:
    """Bit flips and cuts of a plan file: an error that says so, or the same plan."""
    plan = random_plan(plan_request([9, 30, 4, 17, 17, 2], 4), 1)
    whole = dumps(plan).encode()
    rng = random.Random(3)
    for _ in range(cases):
        data = bytearray(whole)
        if rng.random() < 0.2:
            data = data[: rng.randrange(len(data))]
        else:
            for _ in range(rng.choice((1, 1, 2, 8))):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        try:
            read = loads(bytes(data))
        except PlanError:
            continue
        assert canonical_bytes(read) == canonical_bytes(plan)


def test_every_damage_to_a_plan_file_is_an_error_or_harmless() -> None:
    damaged_plans(500)


@pytest.mark.nightly
def test_every_damage_to_a_plan_file_is_an_error_or_harmless_10000() -> None:
    damaged_plans(10_000)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"schema": "mdcp.cost/9"}, "schema"),
        ({"linear_us_per_token": -1.0}, "linear_us_per_token"),
        ({"links": []}, "links"),
        ({"attn_us_per_pair": float("inf")}, "attn_us_per_pair"),
    ],
)
def test_a_profile_out_of_schema_or_range_is_refused(tmp_path, change, text) -> None:
    from megatron_dcp.cost import dumps as dump_profile

    body = {**json.loads(dump_profile(tiny_profile())), **change}
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(body))
    with pytest.raises(mdcp.ConfigError, match=text):
        mdcp.initialize(TinyModel(), None, cost=str(path))
