"""Peak memory of a step as its event tells it: counted anew in each step."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

import megatron_dcp as mdcp
from megatron_dcp.observe.shares import step_shares
from megatron_dcp.testing.cases.gradients import Samples
from megatron_dcp.testing.models import TinyModel, weighted_loss_sum
from megatron_dcp.testing.plans import tiny_profile

MB = 10**6


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no /proc of Linux")
def test_a_step_tells_the_most_that_it_held():
    model = TinyModel(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = mdcp.initialize(model, optimizer, cost=tiny_profile(), measure=True, plan_ahead=0)
    loader = engine.dataloader(Samples([9] * 12, 0), global_batch_size=4, lengths="lengths")
    for step in loader:
        # 200 MB, in the second step; not from the heap, which may keep what is freed.
        ballast = None
        if step.index == 1:
            ballast = torch.frombuffer(mmap.mmap(-1, 200 * MB), dtype=torch.uint8).fill_(1)
        for mb in step:
            mb.backward(weighted_loss_sum(model(**mb.inputs), mb.labels, mb.weights))
        step.finish()
        del ballast
    steps = [e for e in engine.take_events() if e["kind"] == "step"]
    assert len(steps) == 3
    before, with_ballast, after = (e["bytes"] for e in steps)
    assert with_ballast - before > 150 * MB
    assert with_ballast - after > 150 * MB, "the mark of the step before does not stay"


def test_without_a_mark_there_is_no_peak(monkeypatch, tmp_path):
    monkeypatch.setattr("megatron_dcp.runtime.memory._REFS", tmp_path / "absent" / "clear_refs")
    engine = mdcp.initialize(TinyModel(seed=0), None, cost=tiny_profile(), measure=True)
    engine.log.end_step(engine.log.begin_step(), tokens=3)
    (event,) = engine.take_events()
    assert "bytes" not in event
    placement = {**event, "kind": "placement", "first_rank": 0}
    assert step_shares([event, placement])[0].peaks == ()
