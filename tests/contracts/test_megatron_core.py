"""Real megatron-core on gloo ranks: planned training equals static training on the same samples.

Two versions from the package index: 0.16.1 of the ordinary environment and 0.19.2 of a venv of its
own. Static means Megatron as it is (its attention, its RoPE, one unpadded sample per microbatch);
planned means plans that mix degrees, schemes, packs, holes and recomputation every step.

Tolerances, relative, over 20 steps: fp32 loss 2e-6 and gradient norm 1e-4. bf16: activations have
8 bits (unit roundoff 2^-9 = 2e-3). The loss is a mean of about 200 token losses with independent
rounding, 2e-3 / sqrt(200) = 1.4e-4, and 20 steps of drift at most double it: 5e-4; the norm sums
gradients that are each rounded once per microbatch, 4 to 6 of them: 1e-2.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from megatron_dcp.adapters.megatron.profile import read_model
from megatron_dcp.errors import ConfigError
from megatron_dcp.testing.pool import WorkerPool

pytestmark = pytest.mark.distributed

FP32 = (2e-6, 1e-4)
# Eight layers in chunks of one seed: a static run whose first weights are off by 1e-7 ends as far
# from itself, 2e-5 and 2e-2 (the first three steps' norms are equal to the last digit).
DEEP = (5e-5, 5e-2)
BF16 = (5e-4, 1e-2)
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.0}
FULL = {
    "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
}  # fmt: skip
BALANCED = {
    **EXPERTS, "moe_aux_loss_coeff": 0.1, "moe_router_load_balancing_type": "seq_aux_loss",
}  # fmt: skip
GLOBAL = {**BALANCED, "moe_router_load_balancing_type": "global_aux_loss"}
# Two losses at once, and what looks at whole microbatches besides.
SIGMOID = {
    **EXPERTS, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.02, "moe_z_loss_coeff": 0.05,
}  # fmt: skip
# Experts are spread over tensor and data ranks: gloo has no gather of the unequal parts that an
# expert cut over tensor ranks needs.
SPREAD = {"tp": 2, "ep": 4, "etp": 1}
SLICES = {"sequence_parallel": True}
FOUR_LAYERS = {"num_layers": 4}

# name -> (ranks, case, tolerances)
CASES: dict[str, tuple[int, dict[str, Any], tuple[float, float]]] = {
    "dp2": (2, {}, FP32),
    "dp4": (4, {}, FP32),
    "tp2-dp2": (4, {"tp": 2}, FP32),
    "pp2-dp2": (4, {"pp": 2}, FP32),
    "pp4": (4, {"pp": 4, "model": FOUR_LAYERS}, FP32),
    "interleaved-pp2-dp2": (4, {"pp": 2, "vp": 2, "model": FOUR_LAYERS}, FP32),
    "interleaved-pp4": (4, {"pp": 4, "vp": 2, "model": {"num_layers": 8}}, DEEP),
    "cp2-dp2": (4, {"cp": 2}, FP32),
    "distributed-optimizer-overlap": (4, {"distributed": True}, FP32),
    "moe-ep2": (2, {"ep": 2, "model": EXPERTS}, FP32),
    "moe-ep2-dp4": (4, {"ep": 2, "model": EXPERTS}, FP32),
    "moe-sequence-loss": (2, {"ep": 2, "model": BALANCED}, FP32),
    "moe-sequence-loss-recompute": (4, {"pp": 2, "model": {**BALANCED, **FULL}}, FP32),
    "moe-sequence-loss-tp2": (4, {**SPREAD, "model": {**BALANCED, **SLICES}}, FP32),
    "moe-global-loss": (2, {"ep": 2, "model": GLOBAL}, FP32),
    "moe-global-loss-packed": (2, {"ep": 2, "model": GLOBAL, "strategy": "packed:2"}, FP32),
    "moe-global-loss-pp2": (4, {"pp": 2, "model": {**GLOBAL, **FULL}}, FP32),
    "moe-global-loss-tp2": (4, {**SPREAD, "model": {**GLOBAL, **SLICES}}, FP32),
    "moe-expert-bias-z-loss": (2, {"ep": 2, "model": SIGMOID}, FP32),
    "moe-expert-bias-z-loss-tp2": (4, {**SPREAD, "model": {**SIGMOID, **SLICES}}, FP32),
    "recompute-full": (
        2,
        {"model": FULL},
        FP32,
    ),
    "recompute-selective": (2, {"model": {"recompute_granularity": "selective"}}, FP32),
    "window-in-some-layers": (
        2,
        {"model": {"window_size": [7, 0], "window_attn_skip_freq": 2, **FOUR_LAYERS}},
        FP32,
    ),
    "learned-positions": (2, {"positions": "learned_absolute"}, FP32),
    "dcp-strategy": (2, {"strategy": "dcp"}, FP32),
    "packed-strategy": (4, {"strategy": "packed:2"}, FP32),
    "bf16": (2, {"bf16": True}, BF16),
}
OWN_CASES = (
    "dp2", "dp4", "tp2-dp2", "pp2-dp2", "interleaved-pp2-dp2", "cp2-dp2",
    "distributed-optimizer-overlap", "moe-ep2", "moe-sequence-loss", "recompute-full", "bf16",
    "moe-sequence-loss-tp2", "moe-global-loss", "moe-global-loss-pp2", "moe-global-loss-tp2",
    "moe-expert-bias-z-loss", "moe-expert-bias-z-loss-tp2",
)  # fmt: skip
# Variations of a case that runs anyway, and what the other version runs.
NIGHTLY = (
    "pp4", "interleaved-pp4", "recompute-selective", "learned-positions", "packed-strategy",
    "moe-ep2",
    "moe-sequence-loss-recompute", "moe-global-loss-packed", "moe-global-loss-tp2",
    "moe-expert-bias-z-loss-tp2", "moe-global-loss-pp2", "dp2", "moe-sequence-loss",
)  # fmt: skip
OWN_NIGHTLY = (
    "dp4", "interleaved-pp2-dp2",
    "moe-sequence-loss", "moe-sequence-loss-tp2", "dp2", "tp2-dp2", "pp2-dp2", "recompute-full",
    "moe-ep2", "moe-global-loss", "moe-global-loss-pp2", "moe-global-loss-tp2",
    "moe-expert-bias-z-loss", "moe-expert-bias-z-loss-tp2",
)  # fmt: skip


def _marked(names: Iterable[str], nightly: tuple[str, ...]) -> list[Any]:
    return [
        pytest.param(name, marks=pytest.mark.nightly if name in nightly else ()) for name in names
    ]


def _difference(static: list[float], planned: list[float]) -> float:
    return max(abs(a - b) / abs(a) for a, b in zip(static, planned, strict=True))


def _check(pool: WorkerPool, name: str, version: str) -> None:
    ranks, case, (loss_tolerance, norm_tolerance) = CASES[name]
    results = pool.run(ranks, "tests.contracts.megatron_cases:compare", **case)
    for result in results:
        static, planned = result["static"], result["planned"]
        assert result["version"] == version
        assert len(static["losses"]) == 20
        assert _difference(static["losses"], planned["losses"]) <= loss_tolerance
        assert _difference(static["norms"], planned["norms"]) <= norm_tolerance
        assert planned["digests"] == results[0]["planned"]["digests"]
    assert len(set(results[0]["planned"]["digests"])) == 20  # a new plan every step
    if name in ("dp2", "dp4", "cp2-dp2"):
        # The accumulation is ragged: some step has other microbatch counts on other ranks.
        assert len({tuple(r["planned"]["microbatches"]) for r in results}) > 1 or ranks == 2
        assert any(d > 1 for r in results for d in r["planned"]["all_degrees"])


@pytest.mark.parametrize("name", _marked(CASES, NIGHTLY))
def test_planned_equals_static(megatron_pool: WorkerPool, name: str) -> None:
    _check(megatron_pool, name, "0.16.1")


@pytest.mark.parametrize("name", _marked(OWN_CASES, OWN_NIGHTLY))
def test_planned_equals_static_on_the_newer_core(own_megatron_pool: WorkerPool, name: str) -> None:
    _check(own_megatron_pool, name, "0.19.2")


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ({"model": {"hidden_dropout": 0.1}}, "hidden_dropout is 0.1"),
        ({"model": {"calculate_per_token_loss": False}}, "calculate_per_token_loss"),
        ({"model": {**EXPERTS, "moe_aux_loss_coeff": 0.1}}, "moe_router_load_balancing_type"),
        (
            {"ep": 2, "model": {**EXPERTS, "moe_token_dispatcher_type": "allgather"}},
            "alltoall or flex",
        ),
        (
            {"etp": 2, "model": {**EXPERTS, "moe_token_dispatcher_type": "allgather"}},
            "alltoall or flex",
        ),
        (
            {"pp": 2, "vp": 2, "default_p2p": True, "model": FOUR_LAYERS},
            "With two stages Megatron then sends",
        ),
        (
            {"pp": 2, "vp": 2, "model": {**FOUR_LAYERS, "microbatch_group_size_per_vp_stage": 4}},
            "microbatch_group_size_per_vp_stage is 4",
        ),
        ({"model": {"mtp_num_layers": 1}}, "mtp_num_layers is 1 and does not run"),
        ({"model": {"fp8": "e4m3"}}, "fp8 is 'e4m3' and does not run"),
        ({"model": {"tp_comm_overlap": True}}, "tp_comm_overlap is True and does not run"),
        ({"model": {"qk_clip": True}}, "qk_clip (the largest logit is not kept)"),
        ({"mixer": True}, "in every layer of the layer spec, found GatedDeltaNet"),
        ({"plain": True}, "in every layer of the GPTModel, found SelfAttention"),
        ({"positions": "mrope", "model": {"mrope_section": [1, 1, 2]}}, "Use rope or yarn"),
        ({"strategy": "static", "memory_gb": 1e-6}, "bytes"),
        ({"pp": 2, "strategy": "static", "flight": 1.5}, "bytes"),
        ({"strategy": "nonesuch"}, "unknown strategy 'nonesuch'"),
        ({"oversize": "drop"}, "--mdcp-oversize drop"),
        ({"fault": "fraction"}, "fractional loss weights"),
        ({"fault": "end"}, "iterator ended before"),
        ({"fault": "lengths"}, "items without lengths"),
        ({"fault": "loader"}, "data-parallel rank 1: OSError: the disk is gone"),
        ({"cp": 2, "fault": "context"}, "data-parallel rank 0: OSError: the disk is gone"),
        ({"pp": 2, "fault": "stage"}, "stage 1, context rank 0 reads other samples"),
        ({"forward": "nested"}, "forward step nested_forward of tests.contracts.megatron_losses"),
    ],
)
def test_refused_on_every_rank_before_the_first_step(
    megatron_pool: WorkerPool, case: dict[str, Any], text: str
) -> None:
    """`flight`: memory for so many microbatches of two stages; 1F1B holds two at once."""
    results = megatron_pool.run(2, "tests.contracts.megatron_probes:refused", **case)
    for result in results:
        assert text in result["error"]
        assert result["kind"] in ("AdapterError", "AgreementError", "PlanError", "ConfigError")
        assert result["steps"] == 0


def test_a_mean_for_a_loss_is_refused_in_the_first_forward(megatron_pool: WorkerPool) -> None:
    """Only a forward shows what a loss function returns: the first step has begun."""
    target = "tests.contracts.megatron_probes:refused"
    for result in megatron_pool.run(2, target, forward="mean", steps=2):
        assert "found 2 values: a mean over a microbatch depends on the plan" in result["error"]
        assert (result["kind"], result["steps"]) == ("AdapterError", 1)


def test_data_that_ends_in_the_second_step_is_found_before_that_step(
    megatron_pool: WorkerPool,
) -> None:
    """The steps that had begun are counted: the first one here."""
    case = {"fault": "end", "fault_step": 1, "steps": 3}
    for result in megatron_pool.run(2, "tests.contracts.megatron_probes:refused", **case):
        assert "iterator ended before" in result["error"]
        assert result["steps"] == 1


def test_hidden_dropout_runs_where_it_is_allowed(megatron_pool: WorkerPool) -> None:
    case = {"model": {"hidden_dropout": 0.1}, "options": {"allow_plan_dependent": True}}
    for result in megatron_pool.run(2, "tests.contracts.megatron_probes:refused", **case):
        assert (result["error"], result["steps"]) == ("", 1)


# Settings of a mixture of experts -> what their refusal names; allowed by the named option.
PLAN_DEPENDENT = [
    ({"moe_router_load_balancing_type": "sinkhorn"}, "sinkhorn (routes by the whole microbatch)"),
    (
        {"moe_router_load_balancing_type": ["seq_aux_loss", "aux_loss"],
         "moe_aux_loss_coeff": [0.1, 0.1]},
        "moe_router_load_balancing_type aux_loss",
    ),
    ({"moe_expert_capacity_factor": 1.0}, "moe_expert_capacity_factor"),
    ({"moe_input_jitter_eps": 0.1}, "moe_input_jitter_eps"),
    ({"moe_router_force_load_balancing": True}, "moe_router_force_load_balancing"),
    ({"moe_enable_routing_replay": True}, "moe_enable_routing_replay"),
]  # fmt: skip
NEWER = [
    ({"moe_router_load_balancing_type": "quantile_balancing"}, "quantile_balancing"),
    ({"moe_router_force_biased": 0.1}, "moe_router_force_biased"),
]


@pytest.mark.parametrize("newer", [False, True])
def test_plan_dependent_experts_are_refused_by_name(
    megatron_pool: WorkerPool, own_megatron_pool: WorkerPool, newer: bool
) -> None:
    pool = own_megatron_pool if newer else megatron_pool
    cases = PLAN_DEPENDENT + (NEWER if newer else [])
    settings = [{**EXPERTS, **changes} for changes, _ in cases]
    target = "tests.contracts.megatron_experts:refusals"
    refused = pool.run(1, target, settings=settings)[0]
    for (_, text), error in zip(cases, refused, strict=True):
        assert text in error
        assert "--mdcp-allow-plan-dependent" in error
    assert pool.run(1, target, settings=settings, allowed=True)[0] == [""] * len(cases)


def test_experts_that_the_newer_core_cannot_run_apart_are_refused(
    own_megatron_pool: WorkerPool,
) -> None:
    """With the option as well; what 0.16 has of it is in tests/unit/adapters."""
    hybrid = {**EXPERTS, "moe_token_dispatcher_type": "flex", "expert_model_parallel_size": 2,
              "moe_flex_dispatcher_backend": "hybridep"}  # fmt: skip
    quantile = {**EXPERTS, "moe_router_load_balancing_type": "quantile_balancing"}
    settings = [
        {**quantile, "context_parallel_size": 2},
        hybrid,
        {**hybrid, "moe_flex_dispatcher_backend": "ncclep"},
        {**hybrid, "moe_hybridep_pad_uneven_dispatch_inputs": True},
        quantile,
    ]
    target = "tests.contracts.megatron_experts:refusals"
    found = own_megatron_pool.run(1, target, settings=settings, allowed=True)[0]
    assert "quantile_balancing with context_parallel_size 2" in found[0]
    assert "Pass --moe-hybridep-pad-uneven-dispatch-inputs" in found[1]
    assert "ncclep makes its buffers for" in found[2]
    assert found[3:] == ["", ""]


def test_a_router_that_is_recomputed_alone_cannot_follow_the_plan(
    megatron_pool: WorkerPool,
) -> None:
    alone = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]}
    settings = [{**m, **alone} for m in (BALANCED, GLOBAL, SIGMOID, EXPERTS)]
    target = "tests.contracts.megatron_experts:refusals"
    *followed, plain = megatron_pool.run(1, target, settings=settings, allowed=True)[0]
    names = ("seq_aux_loss", "global_aux_loss", "moe_z_loss_coeff")
    for name, error in zip(names, followed, strict=True):
        assert f"{name} with recompute_modules moe" in error
    assert plain == ""


def test_a_resume_continues_with_the_expert_frequencies(megatron_pool: WorkerPool) -> None:
    """Through `state_dict` of a loop of its own; without the counts the steps are others."""
    target = "tests.contracts.megatron_experts:resume"
    for result in megatron_pool.run(2, target, ep=2, model=GLOBAL):
        whole, rest, without = result["whole"], result["rest"], result["without"]
        assert rest["digests"] == whole["digests"][3:]
        assert result["first"]["losses"] + rest["losses"] == whole["losses"]
        assert result["first"]["norms"] + rest["norms"] == whole["norms"]
        assert _difference(whole["norms"][3:], without["norms"]) > 1e-3


def test_a_window_of_two_microbatches_fits_where_one_and_a_half_do_not(
    megatron_pool: WorkerPool,
) -> None:
    """The other side of the refusal above, with a little more memory."""
    case = {"pp": 2, "strategy": "static", "flight": 2.01}
    for result in megatron_pool.run(2, "tests.contracts.megatron_probes:refused", **case):
        assert (result["error"], result["steps"]) == ("", 1)


@pytest.mark.parametrize("newer", [False, True])
def test_ranks_with_dummies_only_join_the_log_of_balance_losses(
    megatron_pool: WorkerPool, own_megatron_pool: WorkerPool, newer: bool
) -> None:
    """Megatron reduces each loss over groups that a rank knows once it has recorded one."""
    names = ["seq_load_balancing_loss", "global_load_balancing_loss"]
    both = {
        **EXPERTS, "moe_router_load_balancing_type": ["seq_aux_loss", "global_aux_loss"],
        "moe_aux_loss_coeff": [0.1, 0.1],
    }  # fmt: skip
    pool = own_megatron_pool if newer else megatron_pool
    results = pool.run(2, "tests.contracts.megatron_experts:logged", names=names, ep=2, model=both)
    for first, second in results:
        assert set(first) == set(second) == set(names)
        assert 0 < first["seq_load_balancing_loss"] < second["seq_load_balancing_loss"]
        assert 0 < first["global_load_balancing_loss"] < second["global_load_balancing_loss"]
    assert results[0][0] == results[1][0]


@pytest.mark.parametrize(
    ("ranks", "case"),
    [(2, {"plans": "mix"}), (2, {"plans": "first"}), (4, {"plans": "mix", "pp": 2})],
)
def test_an_evaluation_reports_sums_over_the_global_batch(
    megatron_pool: WorkerPool, ranks: int, case: dict[str, Any]
) -> None:
    """One report: Megatron's mean over microbatches (--sft) would count dummies and the plan."""
    results = megatron_pool.run(ranks, "tests.contracts.megatron_probes:evaluate", **case)
    for result in results:
        if not result["last"]:
            assert result["planned"] == []
            continue
        ((loss, count),) = result["planned"]
        ((static_loss, static_count),) = result["static"]
        assert count == static_count
        assert abs(loss - static_loss) <= 2e-6 * static_loss


@pytest.mark.parametrize(("case", "ranks"), [({"etp": 2}, 2), ({"ep": 2}, 2), ({}, 1)])
def test_expert_tokens_that_travel_make_a_lockstep_domain(
    megatron_pool: WorkerPool, case: dict[str, int], ranks: int
) -> None:
    """Expert tensor parallelism wider than the attention's spreads tokens over data ranks, too."""
    target = "tests.contracts.megatron_probes:lockstep"
    assert megatron_pool.run(2, target, **case) == [ranks] * 2


def test_a_rerun_of_a_step_gives_the_same_bits(megatron_pool: WorkerPool) -> None:
    """Megatron's rerun machine rewinds the iterator: same samples, plan, loss and gradients.

    The experts' loss keeps the frequencies that the first attempt had.
    """
    for result in megatron_pool.run(2, "tests.contracts.megatron_probes:replay", model=GLOBAL):
        first, again, following = result["losses"]
        assert first == again != following
        assert result["digests"][0] == result["digests"][1] != result["digests"][2]
        assert result["equal"]
        assert result["next_differs"]


@pytest.mark.parametrize("kind", ["indexed", pytest.param("chats", marks=pytest.mark.nightly)])
def test_megatrons_own_data_sets(
    megatron_pool: WorkerPool, own_megatron_pool: WorkerPool, tmp_path: Path, kind: str
) -> None:
    """.bin/.idx documents and SFT conversations: the data set's boundaries are the lengths.

    The static run has each document or conversation alone, so attention across one would show.
    """
    pool = megatron_pool if kind == "indexed" else own_megatron_pool  # SFT: megatron.training
    case = {"data": kind, "folder": str(tmp_path), "steps": 6}
    for result in pool.run(2, "tests.contracts.megatron_cases:compare", **case):
        static, planned = result["static"], result["planned"]
        assert _difference(static["losses"], planned["losses"]) <= FP32[0]
        assert _difference(static["norms"], planned["norms"]) <= FP32[1]
        assert sum(static["microbatches"]) > 6 * 4  # more samples than rows
        assert 2 in planned["all_degrees"]


def test_a_profile_measured_on_megatrons_own_model_plans_its_steps(
    megatron_pool: WorkerPool, tmp_path: Path
) -> None:
    """`mdcp profile --model megatron:FILE`: one profile on all ranks, accepted by the run."""
    results = megatron_pool.run(
        2, "tests.contracts.megatron_probes:profile_then_train", folder=str(tmp_path)
    )
    profile = json.loads(results[0]["profile"])
    assert results[1]["profile"] == results[0]["profile"]
    assert profile["model"]["kv_heads"] == 2
    assert profile["linear_us_per_token"] + profile["overhead_us"]["async"] > 0
    assert set(results[0]["errors"]) >= {"linear", "recompute", "communication"}
    assert len(set(results[0]["digests"])) == 3
    assert all(math.isfinite(x) for x in results[0]["losses"])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hiden_size": 8}, "hiden_size"),
        ({"tensor_model_parallel_size": 2}, "profiles are measured with 1"),
    ],
)
def test_a_wrong_model_file_is_refused(tmp_path: Path, changes: Any, text: str) -> None:
    file = tmp_path / "model.json"
    file.write_text(json.dumps({"num_layers": 1, **changes}))
    with pytest.raises(ConfigError, match=text):
        read_model(file)
