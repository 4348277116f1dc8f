"""A fitted profile is used on the device and model that it was measured on, or forced."""

import logging
from dataclasses import replace

import pytest
import torch

import megatron_dcp as mdcp
from megatron_dcp.cost import resolve
from megatron_dcp.errors import ConfigError
from megatron_dcp.runtime.fingerprint import model_fingerprint


def test_initialize_refuses_a_profile_of_another_device_or_model(caplog):
    model = torch.nn.Linear(3, 2)
    here = model_fingerprint(model, torch.device("cpu"))
    assert here["parameters"] == 8
    fitted = replace(resolve("a100-gpt7b"), name="fitted", fingerprint=here)
    assert mdcp.initialize(model, cost=fitted).profile is fitted
    other = replace(fitted, fingerprint={**here, "device": "NVIDIA H200"})
    with pytest.raises(ConfigError, match="NVIDIA H200"):
        mdcp.initialize(model, cost=other)
    with pytest.raises(ConfigError, match="parameters"):
        mdcp.initialize(torch.nn.Linear(3, 3), cost=fitted)
    with caplog.at_level(logging.WARNING, "megatron_dcp"):
        assert mdcp.initialize(model, cost=other, force_cost=True).profile is other
    assert "forced" in caplog.text
