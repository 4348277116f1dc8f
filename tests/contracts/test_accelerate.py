"""Loops of one's own with Accelerate-prepared models, on the real package."""

from __future__ import annotations

import pytest

pytest.importorskip("accelerate")

from types import SimpleNamespace
from typing import Any

from megatron_dcp.adapters.hf import TrainerOptions, initialize_accelerate, prepare
from megatron_dcp.errors import AdapterError
from megatron_dcp.testing.hf_models import tiny_model
from megatron_dcp.testing.pool import WorkerPool

CASE = "megatron_dcp.testing.cases.trainers:accelerate_case"


@pytest.mark.parametrize("backend", ["ddp", "fsdp2", "zero1", "zero2"])
def test_steps_equal_one_process(pool2: WorkerPool, backend: str) -> None:
    """Accelerate's scheduler would step once per process; here it steps once per optimizer step."""
    for r in pool2.run(2, CASE, seed=3, backend=backend):
        assert r["backend"] == backend
        assert r["error"] <= 2.4e-7
        assert r["loss_error"] <= 2e-6
        assert r["scheduler_steps"] == 3


def accelerator(**changes: Any) -> Any:
    """The attributes that are looked at, as an Accelerator has them."""
    values = {
        "gradient_accumulation_steps": 1,
        "mixed_precision": "no",
        "scaler": None,
        "parallelism_config": None,
        **changes,
    }
    return SimpleNamespace(**values)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps=4"),
        ({"mixed_precision": "fp16", "scaler": object()}, "fp16"),
        ({"parallelism_config": SimpleNamespace(sp_size=2, cp_size=1)}, "sp_size=2"),
    ],
)
def test_settings_that_plans_change_are_refused(changes: dict[str, Any], message: str) -> None:
    """Accelerate's own sequence parallelism fixes one degree per process; so it is refused."""
    with pytest.raises(AdapterError, match=message):
        initialize_accelerate(accelerator(**changes), object())


@pytest.mark.parametrize("peft", [False, True])
def test_models_that_were_not_prepared_are_refused(peft: bool) -> None:
    """On stock attention each rank's shard would see itself alone, and other samples."""
    from peft import LoraConfig, get_peft_model

    model = tiny_model("llama")
    if peft:
        prepare(model)  # the layers that LoRA adds were not looked at
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(AdapterError, match=r"before accelerator\.prepare"):
        initialize_accelerate(accelerator(), model)


@pytest.mark.parametrize(
    ("name", "value", "where"),
    [
        ("max_length", 4, "engine.dataloader"),
        ("fused_loss", False, "prepare"),
        ("allow_dropout", True, "prepare"),
    ],
)
def test_options_that_are_given_elsewhere_are_refused(name: str, value: Any, where: str) -> None:
    with pytest.raises(AdapterError, match=f"{name}={value} .give it to {where}"):
        initialize_accelerate(accelerator(), object(), options=TrainerOptions(**{name: value}))
