"""The sampler: each sample once per epoch, a function of the step alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dcp.errors import ConfigError
from megatron_dcp.runtime import GlobalSampler, SamplerConfig


@given(size=st.integers(1, 60), batch=st.integers(1, 20), seed=st.integers(0, 99))
def test_each_sample_comes_once_per_epoch(size: int, batch: int, seed: int) -> None:
    sampler = GlobalSampler(SamplerConfig(size=size, batch=batch, seed=seed, remainder="short"))
    for epoch in range(2):
        steps = range(epoch * sampler.config.steps_per_epoch,
                      (epoch + 1) * sampler.config.steps_per_epoch)  # fmt: skip
        drawn = [i for s in steps for i in sampler.indices(s)]
        assert sorted(drawn) == list(range(size))


def test_steps_are_a_function_of_their_number() -> None:
    config = SamplerConfig(size=50, batch=7, seed=3)
    forward = GlobalSampler(config)
    drawn = [forward.indices(s) for s in range(20)]
    backward = GlobalSampler(config)
    assert [backward.indices(s) for s in reversed(range(20))] == drawn[::-1]
    assert drawn[0] != drawn[7], "another epoch, another order"
    assert [len(x) for x in drawn] == [7] * 20


def test_no_shuffle_keeps_the_order() -> None:
    sampler = GlobalSampler(SamplerConfig(size=5, batch=2, shuffle=False, remainder="short"))
    assert [sampler.indices(s) for s in range(3)] == [[0, 1], [2, 3], [4]]


def test_a_state_of_another_sampler_is_refused() -> None:
    sampler = GlobalSampler(SamplerConfig(size=9, batch=3, seed=1))
    sampler.check_state(sampler.state())
    with pytest.raises(ConfigError, match="seed was 2, is 1"):
        sampler.check_state({**sampler.state(), "seed": 2})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"size": 5, "batch": 6}, "larger than the data set"),
        ({"size": 5, "batch": 0}, ">= 1"),
        ({"size": 5, "batch": 2, "remainder": "pad"}, "remainder"),
    ],
)
def test_unusable_settings(config: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplerConfig(**config)  # type: ignore[arg-type]
