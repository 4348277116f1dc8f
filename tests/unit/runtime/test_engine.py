"""The loop on one rank: what it returns, and misuse that is told at once."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import megatron_dcp as mdcp
from megatron_dcp.errors import ConfigError, NonFiniteLossError, PlanError
from megatron_dcp.plan import Placement
from megatron_dcp.runtime import Engine
from megatron_dcp.testing.models import TinyModel, weighted_loss_sum
from megatron_dcp.testing.plans import finish_plan, tiny_profile

FUNCTION = "a function of the index"


class Texts:
    """Items are arrays; lengths come in several forms."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Any:
        return np.arange(self.lengths[index]) % 64


def engine(**options: Any) -> Engine:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return mdcp.initialize(model, optimizer, cost=tiny_profile(), strategy="static", **options)


def run(e: Engine, mb: Any) -> None:
    mb.backward(weighted_loss_sum(e.model(**mb.inputs), mb.labels, mb.weights))


@pytest.mark.parametrize("source", ["lengths", [7, 9, 3, 5], np.array([7, 9, 3, 5]), FUNCTION])
def test_lengths_come_in_any_form(source: Any) -> None:
    e, data = engine(), Texts([7, 9, 3, 5])
    lengths = (lambda i: data.lengths[i]) if source is FUNCTION else source
    loader = e.dataloader(data, global_batch_size=2, lengths=lengths, epochs=2)
    losses = []
    for step in loader:
        for mb in step:
            run(e, mb)
        losses.append(step.finish())
    assert len(losses) == len(loader) == 4
    assert losses[-1] < losses[0]
    assert loader.position == 4


def test_parameters_in_no_param_group_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    model = TinyModel()
    model.embedding.requires_grad_(False)
    for stepped in (model, model.layers):
        optimizer = torch.optim.SGD(stepped.parameters(), lr=0.1)
        mdcp.initialize(model, optimizer, cost=tiny_profile())
    (record,) = caplog.records
    assert "2 trainable parameters" in record.getMessage()
    assert "head.weight, head.bias." in record.getMessage()


def test_batch_dim_adds_a_leading_one() -> None:
    e = engine()
    loader = e.dataloader(Texts([7, 9]), global_batch_size=2, lengths="lengths", batch_dim=True)
    mb = next(iter(loader)).microbatches[0]
    assert mb.inputs["input_ids"].shape == mb.labels.shape == mb.weights.shape == (1, mb.tokens)


def test_a_step_left_unfinished_is_told() -> None:
    loader = engine().dataloader(Texts([7, 9]), global_batch_size=1, lengths="lengths")
    steps = iter(loader)
    next(steps)
    with pytest.raises(ConfigError, match="left unfinished"):
        next(steps)


def test_a_microbatch_must_be_run_backward() -> None:
    e = engine()
    step = next(iter(e.dataloader(Texts([7]), global_batch_size=1, lengths="lengths")))
    with pytest.raises(ConfigError, match="have not been run"):
        step.finish()
    with pytest.raises(ConfigError, match="was not run backward"):
        for _ in step:
            pass
    with pytest.raises(ConfigError, match="iterated twice"):
        next(iter(step))


def test_backward_wants_one_scalar_with_a_graph() -> None:
    e = engine()
    step = next(iter(e.dataloader(Texts([7]), global_batch_size=1, lengths="lengths")))
    for mb in step:
        with pytest.raises(ConfigError, match="scalar with a graph"):
            mb.backward(torch.zeros(3))
        with pytest.raises(ConfigError, match="scalar with a graph"):
            mb.backward(torch.zeros(()))
        run(e, mb)
        with pytest.raises(ConfigError, match="called twice"):
            run(e, mb)
    step.finish()
    with pytest.raises(ConfigError, match="finished twice"):
        step.finish()


def test_a_step_without_any_label_has_loss_zero_and_zero_gradients() -> None:
    e = mdcp.initialize(TinyModel(), cost=tiny_profile(), strategy="static")
    step = next(iter(e.dataloader(Texts([1, 1]), global_batch_size=2, lengths="lengths")))
    for mb in step:
        run(e, mb)
    assert step.denominator == 0.0
    assert step.finish() == 0.0
    assert all(not p.grad.any() for p in e.model.parameters() if p.grad is not None)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([3, 0], "sample 1 has length 0"),
        ([3, 2.5], "integers"),
        ([3], "1 lengths given for a data set of 2"),
        ("nothing", "no such attribute, column or item key"),
    ],
)
def test_unusable_lengths(lengths: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine().dataloader(Texts([3, 2]), global_batch_size=1, lengths=lengths)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": -1.0}, "memory="),
        ({"memory": "8GB"}, "memory="),
        ({"lockstep": 3}, "lockstep"),
    ],
)
def test_unusable_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine(**options)


def small_budget() -> float:
    """GB for 10 recomputed tokens of the tiny profile: 2 layers x 100 bytes each."""
    return 10 * 2 * 100 / 1e9


def test_a_sample_that_cannot_fit_is_an_error_with_its_id_and_bytes() -> None:
    e = engine(memory=small_budget())
    loader = e.dataloader(Texts([4, 25, 4]), global_batch_size=3, lengths="lengths")
    with pytest.raises(PlanError, match=r"sample 1 of 25 tokens.*needs 5000 bytes.*has 10 tokens"):
        next(iter(loader))


@pytest.mark.parametrize(("policy", "tokens"), [("drop", 8), ("truncate", 18)])
def test_oversize_samples_are_dropped_or_cut_and_counted(policy: Any, tokens: int) -> None:
    e = engine(memory=small_budget(), oversize=policy)
    loader = e.dataloader(Texts([4, 25, 4]), global_batch_size=3, lengths="lengths")
    for step in loader:
        assert step.tokens == tokens
        for mb in step:
            run(e, mb)
        step.finish()
    assert (loader.dropped, loader.cut) == ((1, 0) if policy == "drop" else (0, 1))


def test_max_length_clips() -> None:
    e = engine()
    loader = e.dataloader(Texts([4, 25]), global_batch_size=2, lengths="lengths", max_length=6)
    assert sorted(next(iter(loader)).plan.lengths) == [4, 6]


def test_a_shape_quantum_pads_after_clipping() -> None:
    e = engine()
    loader = e.dataloader(
        Texts([4, 25, 3]), global_batch_size=3, lengths="lengths", max_length=8, shape_quantum=4
    )
    step = next(iter(loader))
    assert sorted(step.plan.lengths) == [4, 4, 8]
    assert (step.tokens, step.padding) == (15, 1)
    assert step.denominator == 3 + 7 + 2  # every real token but the last of each sample
    for mb in step:
        run(e, mb)
    step.finish()


def test_a_plan_that_recomputes_more_than_the_model_has_is_refused() -> None:
    def make(request: Any) -> Any:
        placement = Placement(slot=0, first_rank=0, degree=1, samples=(0,), recompute=2)
        return finish_plan(request, [placement])

    model = TinyModel(layers=1)
    e = mdcp.initialize(model, cost=tiny_profile(), plan_fn=make)
    loader = e.dataloader(Texts([4]), global_batch_size=1, lengths="lengths")
    with pytest.raises(ConfigError, match="none wrapped"):
        next(iter(loader))
    e.wrap_layers(model.layers)
    with pytest.raises(ConfigError, match=r"recomputes 2 layers .layers., the model has 1"):
        next(iter(loader))


@pytest.mark.parametrize(
    ("change", "words"),
    [({"fused": True}, "is `fused`"), ({"samples": (0,)}, "sample 1 is placed 0 times")],
)
def test_a_plan_of_the_users_is_checked_before_it_runs(change: dict[str, Any], words: str) -> None:
    def make(request: Any) -> Any:
        plan = finish_plan(request, [Placement(slot=0, first_rank=0, degree=1, samples=(0, 1))])
        return replace(plan, placements=(replace(plan.placements[0], **change),))

    e = mdcp.initialize(TinyModel(), cost=tiny_profile(), plan_fn=make)
    with pytest.raises(PlanError, match=words):
        next(iter(e.dataloader(Texts([4, 5]), global_batch_size=2, lengths="lengths")))


def test_a_checkpoint_of_another_strategy_or_profile_is_refused() -> None:
    e = engine()
    e.load_state_dict(e.state_dict())
    other = mdcp.initialize(
        TinyModel(), cost=replace(tiny_profile(), attn_us_per_pair=1.0), strategy="packed:1"
    )
    with pytest.raises(ConfigError, match=r"strategy 'static'.*cost"):
        other.load_state_dict(e.state_dict())


def test_a_loader_resumes_at_its_position() -> None:
    data = Texts([5, 6, 7, 8, 9, 10])

    def losses(e: Engine, loader: Any, count: int) -> list[float]:
        out: list[float] = []
        for step in loader:
            for mb in step:
                run(e, mb)
            out.append(step.finish())
            if len(out) == count:
                break
        return out

    e = engine()
    whole = e.dataloader(data, global_batch_size=2, lengths="lengths", epochs=2)
    assert len(losses(e, whole, 3)) == 3
    state = whole.state_dict()
    assert state["position"] == 3, "a finished step counts, also when the loop ends there"
    again = e.dataloader(data, global_batch_size=2, lengths="lengths", epochs=2)
    again.load_state_dict(state)
    assert next(iter(again)).index == state["position"]


class Clips(Texts):
    """Samples of (frames, 2, 3) tokens with a caption each."""

    def __init__(self, frames: list[int]) -> None:
        super().__init__([6 * f for f in frames])
        self.shapes = [(f, 2, 3) for f in frames]

    def __getitem__(self, index: int) -> Any:
        ids = super().__getitem__(index)
        return {"input_ids": ids, "caption": torch.tensor([[index, 7]])}


def test_shapes_reach_plan_and_microbatch_and_captions_come_by_sample() -> None:
    e, data = engine(), Clips([2, 1, 5])
    loader = e.dataloader(
        data, global_batch_size=3, lengths="lengths", shapes="shapes", per_sample=["caption"]
    )
    step = next(iter(loader))
    assert step.plan.workload.shapes == tuple(data.shapes[i] for i in step.indices)
    for mb in step:
        index = mb.context.sample_index
        assert mb.context.shapes == tuple(
            step.plan.workload.shapes[i] for i in mb.placement.samples
        )
        assert mb.inputs["caption"].tolist() == [[step.indices[i], 7] for i in mb.placement.samples]
        assert torch.equal(mb.inputs["caption"][index, 0], mb.context.sample_ids)
        inputs = {k: mb.inputs[k] for k in ("input_ids", "position_ids")}
        mb.backward(weighted_loss_sum(e.model(**inputs), mb.labels, mb.weights))
    step.finish()


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        ([(2, 2, 3), (1, 2, 3)], {}, "2 shapes given for a data set of 3"),
        ([(2, 2, 3), (1, 2, 3), (4, 2, 3)], {}, r"sample 2 has shape \(4, 2, 3\) and length 30"),
        ("sizes", {}, "shapes='sizes': the data set"),
        ("shapes", {"max_length": 6}, "cannot be cut"),
        ("shapes", {"shape_quantum": 4}, "which a grid cannot be"),
    ],
)
def test_wrong_shapes_are_told_at_once(shapes: Any, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine().dataloader(
            Clips([2, 1, 5]), global_batch_size=1, lengths="lengths", shapes=shapes, **options
        )


def test_clips_cannot_be_truncated_to_fit() -> None:
    e = engine(oversize="truncate")
    with pytest.raises(ConfigError, match="oversize='error' or 'drop'"):
        e.dataloader(Clips([2]), global_batch_size=1, lengths="lengths", shapes="shapes")


@pytest.mark.parametrize("fault", ["exception", "nan"])
def test_a_step_that_was_broken_off_leaves_nothing_in_the_next(fault: str) -> None:
    def train(broken: bool) -> list[float]:
        e, losses = engine(), []
        loader = e.dataloader(Texts([7, 9, 3, 5]), global_batch_size=2, lengths="lengths")
        while loader.position < len(loader):
            try:
                for step in loader:
                    for mb in step:
                        loss = weighted_loss_sum(e.model(**mb.inputs), mb.labels, mb.weights)
                        mb.backward(loss * float("nan") if broken and fault == "nan" else loss)
                        if broken and fault == "exception":
                            raise ZeroDivisionError
                    losses.append(step.finish())
            except (ZeroDivisionError, NonFiniteLossError):
                broken = False
        return losses

    assert train(broken=True) == train(broken=False)


@pytest.mark.parametrize(
    "option",
    [
        {"strategy": "fastest"}, {"strategy": "packed:0"}, {"recompute": "on"},
        {"oversize": "keep"}, {"normalize": "batch"},
        {"memory": float("nan")}, {"max_grad_norm": -1.0}, {"max_grad_norm": float("nan")},
        {"plan_ahead": -1}, {"timeout_s": 0}, {"cost": 5}, {"optimizer": "adam"},
        {"scheduler": 0.1}, {"watchdog_dir": f"{__file__}/stacks", "watchdog_s": 9.0},
    ],
)  # fmt: skip
def test_bad_options_are_refused_at_once(option: dict[str, Any]) -> None:
    name = next(iter(option))
    with pytest.raises(ConfigError, match=name):
        mdcp.initialize(TinyModel(), **{"cost": tiny_profile(), **option})


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"global_batch_size": 1.5}, "global_batch_size=1.5"), ({"lengths": None}, "lengths=None"),
        ({"steps": -1}, "steps=-1"), ({"epochs": -1}, "epochs=-1"), ({"seed": -1}, "seed=-1"),
        ({"max_length": 0}, "max_length=0"), ({"shape_quantum": -1}, "shape_quantum=-1"),
        ({"max_length": 6, "shape_quantum": 4}, "no multiple of shape_quantum=4"),
    ],
)  # fmt: skip
def test_bad_loader_options_are_refused_at_once(option: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        engine().dataloader(
            Texts([3, 4]), **{"global_batch_size": 1, "lengths": "lengths", **option}
        )


@pytest.mark.parametrize("own", [False, True])
def test_a_forward_without_this_packages_attention_is_told_once(
    own: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """With attention of its own a model mixes the samples of a pack; only the user can tell."""
    model = TinyModel()
    e = mdcp.initialize(model, None, cost=tiny_profile(), strategy="packed:1")
    packs = 0
    for step in e.dataloader(Texts([5] * 8), global_batch_size=4, lengths="lengths"):
        for mb in step:
            packs += len(mb.placement.samples) > 1
            attend = {"attend": lambda q, k, v: q * 1.0} if own else {}
            mb.backward(weighted_loss_sum(model(**mb.inputs, **attend), mb.labels, mb.weights))
        step.finish()
    assert packs > 1
    told = [r.getMessage() for r in caplog.records if "did not call mdcp.attention" in r.msg]
    assert len(told) == own
    assert not own or "step 0: the forward of 4 samples on 1 ranks" in told[0]


def exposed_ms(plan_ahead: int) -> list[float]:
    """How long steps of 150 ms waited for a planner that takes 50 ms, as the metric and the events
    tell."""
    made = engine(plan_ahead=plan_ahead, measure=True)
    plain = made.plan_fn

    def slow(request: Any) -> Any:
        time.sleep(0.05)
        return plain(request)

    made.plan_fn = slow
    told = []
    for step in made.dataloader(Texts([5] * 10), global_batch_size=2, lengths="lengths"):
        for mb in step:
            run(made, mb)
        time.sleep(0.15)
        step.finish()
        told.append(step.metrics["planner_exposed_ms"])
    events = [e["exposed_us"] / 1e3 for e in made.take_events() if e["kind"] == "plan"]
    assert events == pytest.approx(told, abs=0.001)
    return told


def test_planning_is_exposed_in_line_and_hidden_in_the_background() -> None:
    # The wait is measured from a moment after the planner has begun: later on a busy machine.
    assert min(exposed_ms(plan_ahead=0)) >= 45
    first, *steady = exposed_ms(plan_ahead=1)
    assert first >= 45, "nothing hides the first plan"
    assert float(np.median(steady)) < 5
