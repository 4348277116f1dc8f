"""The traps of trainer integrations: each test fails if its trap is stepped into.

docs/integrations/traps.md lists all of them, those of Megatron too, with the test of each.
"""

from __future__ import annotations

import pytest

from megatron_dcp.errors import AdapterError, ConfigError
from megatron_dcp.runtime.backend import BACKENDS
from megatron_dcp.testing.pool import COLLECTIVE_TIMEOUT_S, WorkerPool

pytest.importorskip("deepspeed")

CASES = "megatron_dcp.testing.cases.traps:"


@pytest.mark.parametrize("stage", [1, 2])
def test_repeated_backwards_at_accumulation_1_are_wrong(pool2: WorkerPool, stage: int) -> None:
    """The stock way loses gradients without a word; were it right, the driver could be simpler."""
    results = pool2.run(2, CASES + "naive_zero_case", stage=stage)
    assert max(r["error"] for r in results) > 1e-2


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("static_graph", "static_graph"),
        ("data_parallel", "DistributedDataParallel"),
        ("averaged", "not its average"),
        ("fsdp1", "fully_shard"),
        ("unknown", "looks like a wrapper"),
        ("not_admitted", "admits ddp"),
        ("accumulation", "set it to 1"),
    ],
)
def test_wrappers_that_cannot_be_driven_are_refused(
    pool2: WorkerPool, kind: str, message: str
) -> None:
    for text in pool2.run(2, CASES + "refusal_case", kind=kind):
        assert message in text
        if kind in ("data_parallel", "fsdp1", "unknown"):
            assert "Supported: a plain module" in text


def test_unaligned_plans_are_refused_where_they_would_deadlock(pool2: WorkerPool) -> None:
    """Equal counts are not enough under FSDP2: all ranks must meet in every slot."""
    for text in pool2.run(2, CASES + "unaligned_plan_case"):
        assert "lockstep_slots_match" in text
        assert "deadlock" in text


@pytest.mark.parametrize("kind", ["bare", "ddp", "fsdp2", "zero1"])
def test_parameters_unused_on_some_ranks(pool2: WorkerPool, kind: str) -> None:
    results = pool2.run(2, CASES + "unused_parameter_case", kind=kind, seed=8)
    assert max(r["error"] for r in results) <= (2.4e-7 if kind == "zero1" else 1e-13)
    assert 2 <= sum(r["users"] for r in results) < sum(r["microbatches"] for r in results)


def test_clipping_default_is_written_down() -> None:
    """DeepSpeed's default has changed between releases, so it is put into the config and said."""
    from deepspeed.runtime.constants import GRADIENT_CLIPPING_DEFAULT

    from megatron_dcp.adapters.deepspeed import split_config

    split = split_config({"train_batch_size": 8}, 2)
    assert split.deepspeed["gradient_clipping"] == GRADIENT_CLIPPING_DEFAULT
    assert any("gradient_clipping" in note for note in split.notes)
    silent = split_config({"train_batch_size": 8, "gradient_clipping": 0.5}, 2)
    assert silent.deepspeed["gradient_clipping"] == 0.5
    assert not any("gradient_clipping" in note for note in silent.notes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation"),
        ({"compile": {"deepcompile": True}}, "deepcompile"),
        ({"sequence_parallel_size": 4}, "sequence_parallel_size 4"),
    ],
)
def test_settings_of_a_deepspeed_config_that_fix_one_layout(changes: dict, message: str) -> None:
    from megatron_dcp.adapters.deepspeed import split_config

    with pytest.raises(AdapterError, match=message):
        split_config({"train_batch_size": 8, **changes}, 2)


@pytest.mark.parametrize("argument", ["mpu", "collate_fn"])
def test_deepspeed_gets_no_mpu_and_no_loader(argument: str) -> None:
    """ZeRO spans all data ranks; the groups of a placement are the plan's."""
    from torch import nn

    from megatron_dcp.adapters.deepspeed import initialize

    with pytest.raises(AdapterError, match=f"{argument} was passed"):
        initialize(model=nn.Linear(1, 1), config={"train_batch_size": 2}, **{argument: object()})


def test_collectives_of_the_tests_wait_longer_than_a_loaded_machine_takes() -> None:
    assert COLLECTIVE_TIMEOUT_S >= 45


def test_batch_sizes_of_a_stock_config_keep_their_meaning() -> None:
    from megatron_dcp.adapters.deepspeed import split_config

    stock = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}
    split = split_config({**stock, "megatron_dcp": {"coalesce": True}}, 2)
    assert split.global_batch == 24
    assert split.deepspeed["gradient_accumulation_steps"] == 1
    assert split.options.coalesce
    assert "megatron_dcp" not in split.deepspeed
    with pytest.raises(ConfigError, match="is not train_micro_batch_size_per_gpu"):
        split_config({**stock, "train_batch_size": 25}, 2)
    with pytest.raises(ConfigError, match="unknown keys"):
        split_config({**stock, "megatron_dcp": {"colaesce": True}}, 2)
    with pytest.raises(AdapterError, match="sequence_parallel_size"):
        split_config({**stock, "sequence_parallel_size": 2}, 2)
    for section in ({"coalesce": "false"}, {"shuffle": 0}, None, []):
        with pytest.raises(ConfigError, match=r"use true or false|no JSON object"):
            split_config({**stock, "megatron_dcp": section}, 2)
    assert split_config({**stock, "compile": None}, 2).global_batch == 24


def test_objectives_follow_the_count_policy() -> None:
    """Balancing totals where every slot waits for its slowest rank plans for the wrong thing."""
    waiting = {name for name, b in BACKENDS.items() if b.objective == "sum-of-maxima"}
    assert waiting == {"zero2", "zero3", "fsdp2", "hsdp"}
    assert {n for n, b in BACKENDS.items() if b.recompute_scope == "slot"} == {"zero3"}


def test_resident_bytes_say_what_a_backend_holds() -> None:
    """1e6 parameters in fp32 with Adam on 4 ranks, by hand."""
    held = {n: b.resident_bytes(10**6, 4, element_bytes=4) for n, b in BACKENDS.items()}
    assert held["bare"] == held["ddp"] == held["zero0"] == 16_000_000
    assert held["zero1"] == held["zero2-coalesced"] == 10_000_000
    assert held["zero2"] == 7_000_000
    assert held["zero3"] == held["fsdp2"] == 4_000_000
    assert held["fsdp2-keep"] == 10_000_000
