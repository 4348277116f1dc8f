"""The parts of the Megatron adapter that need no Megatron."""

from __future__ import annotations

import argparse
import functools
import types
from typing import Any

import pytest
import torch

from megatron_dcp.adapters.megatron import standins, versions
from megatron_dcp.adapters.megatron.flags import add_flags, read_flags, refuse_conflicts
from megatron_dcp.adapters.megatron.microbatch import loss_of, per_token, sum_loss
from megatron_dcp.adapters.megatron.patchset import Patch, PatchSet
from megatron_dcp.adapters.megatron.samples import Splitter, check_weights
from megatron_dcp.adapters.megatron.slots import rank_slots
from megatron_dcp.errors import AdapterError
from megatron_dcp.plan import CostRef, Placement, StepPlan, Topology, Workload


def plan(
    placements: list[Placement], ranks: int, *, lockstep: int = 1, stages: int = 1, virtual: int = 1
) -> StepPlan:
    count = sum(len(p.samples) for p in placements)
    return StepPlan(
        strategy="t", algorithm="t", lockstep=lockstep, budget_bytes=1, layers=4,
        topology=Topology(
            data_ranks=ranks, ranks_per_node=ranks, pipeline_stages=stages, virtual_stages=virtual
        ),
        cost=CostRef(name="t", digest="0" * 16), workload=Workload(lengths=(4,) * count),
        placements=tuple(placements), makespan_us=0, lower_bound_us=0,
    )  # fmt: skip


def place(slot: int, first: int, degree: int, sample: int, recompute: int = 0) -> Placement:
    return Placement(
        slot=slot, first_rank=first, degree=degree, samples=(sample,), recompute=recompute,
        scheme="ring" if degree > 1 else "local",
    )  # fmt: skip


def loss_func(loss_mask: torch.Tensor, output: torch.Tensor) -> Any:
    return output.sum(), loss_mask.sum(), {}


def script_step(iterator: Any, model: Any, extra: int = 0) -> Any:
    return model, functools.partial(loss_func, iterator)


def test_the_loss_of_a_script_is_kept_or_its_forward_step_refused() -> None:
    assert loss_of(None) is sum_loss
    assert loss_of(script_step) is loss_func
    assert loss_of(functools.partial(script_step, extra=1)) is loss_func
    for unseen in (lambda iterator, model: (model, None), place, print):
        with pytest.raises(AdapterError, match=r"that it uses, found none\. Name a forward step"):
            loss_of(unseen)


@pytest.mark.parametrize(
    ("out", "found"),
    [((1, {}), "2 values"), ((1, 2, 3, 4), "4 values"), (torch.zeros(3), "Tensor")],
)
def test_a_loss_is_a_sum_a_count_and_a_report(out: Any, found: str) -> None:
    assert per_token(lambda x, scale: (x, scale, {}))(1, scale=2) == (1, 2, {})  # type: ignore[arg-type, comparison-overlap]
    with pytest.raises(AdapterError, match=f"found {found}"):
        per_token(lambda: out)()


RAGGED = [place(0, 0, 1, 0, 2), place(1, 0, 1, 1), place(2, 0, 2, 2, 3), place(0, 2, 1, 3)]


def indices(found: StepPlan, rank: int) -> list[int | None]:
    return [s.index for s in rank_slots(found, rank)]


def test_async_ranks_run_their_own_placements_and_one_dummy_when_idle() -> None:
    p = plan(RAGGED, 4)
    assert [indices(p, r) for r in range(4)] == [[0, 2, 3], [3], [1], [None]]


def test_pipelines_run_equally_many_microbatches_on_every_rank() -> None:
    p = plan(RAGGED, 4, stages=2)
    wanted = [[0, 2, 3], [None, None, 3], [1, None, None], [None, None, None]]
    assert [indices(p, r) for r in range(4)] == wanted
    assert all(s.recompute == 0 for s in rank_slots(p, 1)[:2])


def test_interleaved_pipelines_run_a_multiple_of_the_stages() -> None:
    p = plan(RAGGED, 4, stages=2, virtual=2)
    assert indices(p, 0) == [0, 2, 3, None]
    assert indices(p, 3) == [None] * 4
    assert p.microbatches == 4


def test_lockstep_domains_share_slots_and_recomputation() -> None:
    p = plan(RAGGED, 4, lockstep=2)
    first, second = rank_slots(p, 0), rank_slots(p, 1)
    assert [s.index for s in second] == [None, None, 3]
    assert [s.recompute for s in first] == [s.recompute for s in second] == [2, 0, 3]
    assert [s.index for s in rank_slots(p, 3)] == [None]


def test_domains_coupled_by_a_placement_recompute_alike() -> None:
    p = plan([place(0, 0, 1, 0, 4), place(0, 1, 2, 1, 1)], 4, lockstep=2)
    assert [[s.recompute for s in rank_slots(p, r)] for r in range(4)] == [[4]] * 4


def row(length: int = 10) -> dict[str, Any]:
    return {
        "tokens": torch.arange(length)[None],
        "labels": torch.arange(length)[None] + 1,
        "loss_mask": torch.ones(1, length),
        "position_ids": torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3, 4]])[:, :length],
        "pixels": torch.zeros(1, length, 2, 3),
        "attention_mask": torch.zeros(1, 1, length, length),
    }


def lengths(splitter: Splitter, item: dict[str, Any]) -> list[int]:
    return [len(s["tokens"]) for s in splitter.samples(item)]


def test_rows_become_samples_and_per_token_fields_travel() -> None:
    (sample,) = Splitter().samples(row())
    assert {k: tuple(v.shape) for k, v in sample.items()} == {
        "tokens": (10,), "labels": (10,), "loss_mask": (10,), "position_ids": (10,),
        "pixels": (10, 2, 3),
    }  # fmt: skip


def test_documents_are_cut_where_positions_restart_or_after_the_end_token() -> None:
    assert lengths(Splitter(split="documents", restarts=True), row()) == [3, 2, 5]
    assert lengths(Splitter(split="documents", eod=4), row()) == [5, 5]
    with pytest.raises(AdapterError, match="marks no documents"):
        Splitter(split="documents").samples(row())


def test_cu_seqlens_cut_and_their_padding_is_ignored() -> None:
    item = {**row(), "cu_seqlens": torch.tensor([[0, 4, 10, 10, 10]], dtype=torch.int32)}
    assert lengths(Splitter(), item) == [4, 6]


def test_lists_of_unpadded_samples_are_read_one_by_one() -> None:
    """What Megatron's variable-length data sets give through their identity collate."""

    def one(length: int, padding: int) -> dict[str, torch.Tensor]:
        n = length + padding
        return {
            "tokens": torch.arange(n), "labels": torch.arange(n) + 1,
            "loss_mask": (torch.arange(n) < length).float(), "position_ids": torch.arange(n),
            "original_seq_len": torch.tensor([length]), "padded_seq_len": torch.tensor([n]),
        }  # fmt: skip

    first, second = Splitter().samples([one(5, 3), one(7, 1)])
    assert [len(first["tokens"]), len(second["tokens"])] == [5, 7]
    assert sorted(first) == ["labels", "loss_mask", "position_ids", "tokens"]
    assert second["labels"].tolist() == list(range(1, 8))


def test_weightless_tails_are_cut_and_weightless_samples_left_out() -> None:
    item = row()
    item["loss_mask"][0, 6:] = 0.0
    item["loss_mask"][0, :3] = 0.0
    assert lengths(Splitter(), item) == [6]
    assert lengths(Splitter(trim=False), item) == [10]
    assert lengths(Splitter(split="documents", restarts=True), item) == [2, 1]


def test_items_without_tokens_and_fractional_weights_are_refused() -> None:
    with pytest.raises(AdapterError, match=r"found \['pixels'\]"):
        Splitter().samples({"pixels": torch.zeros(1, 2)})
    with pytest.raises(AdapterError, match="fractional"):
        check_weights([{"tokens": torch.zeros(2), "loss_mask": torch.tensor([1.0, 0.5])}])


def parsed(*argv: str) -> argparse.Namespace:
    return add_flags(add_flags(argparse.ArgumentParser(allow_abbrev=False))).parse_args(argv)


def test_flags_are_the_fields_of_the_records() -> None:
    argv = ["--mdcp-strategy", "static:2", "--mdcp-max-tokens-per-rank", "64", "--mdcp-no-trim"]
    planner, megatron = read_flags(parsed("--mdcp", *argv))
    assert (planner.strategy, planner.memory_gb) == ("static:2", None)
    assert (megatron.max_tokens_per_rank, megatron.no_trim, megatron.split) == (64, True, "auto")
    with pytest.raises(SystemExit):
        parsed("--mdcp-split", "lines")


def test_a_file_of_arguments_is_refused_with_mdcp() -> None:
    """Megatron takes the file's arguments for the parsed ones: --mdcp would be lost."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--yaml-cfg", type=str, default=None)
    add_flags(parser)
    assert parser.parse_args(["--yaml-cfg", "a.yaml"]).yaml_cfg == "a.yaml"
    assert parser.parse_args(["--mdcp"]).mdcp
    both = ["--mdcp", "--yaml-cfg", "a.yaml"]
    for argv in (both, [*both[1:], both[0]]):
        for parse in (parser.parse_args, parser.parse_known_args):
            with pytest.raises(AdapterError, match=r"--mdcp with --yaml-cfg a\.yaml"):
                parse(argv)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("hybrid_context_parallel", True, "--mdcp and --hybrid-context-parallel are both on"),
        ("dynamic_context_parallel", True, "--mdcp and --dynamic-context-parallel are both on"),
        ("use_megatron_fsdp", True, "--use-megatron-fsdp"),
        ("cuda_graph_impl", "local", "--cuda-graph-impl local"),
        ("attention_dropout", 0.1, "--attention-dropout 0.1"),
        ("multi_latent_attention", True, "--multi-latent-attention"),
    ],
)
def test_conflicts_name_the_flag(name: str, value: Any, text: str) -> None:
    refuse_conflicts(argparse.Namespace())
    with pytest.raises(AdapterError, match=text):
        refuse_conflicts(argparse.Namespace(**{name: value}))


def test_hidden_dropout_passes_with_the_option_that_allows_it() -> None:
    refuse_conflicts(argparse.Namespace(hidden_dropout=0.1, mdcp_allow_plan_dependent=True))
    with pytest.raises(AdapterError, match=r"--hidden-dropout 0\.1"):
        refuse_conflicts(argparse.Namespace(hidden_dropout=0.1, mdcp_allow_plan_dependent=False))


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("trainer_of_this_test")
    exec("def run(a, b): return a + b\nclass C:\n    def f(self, x): return x", module.__dict__)
    monkeypatch.setitem(__import__("sys").modules, module.__name__, module)
    return module


def patches(*, run: tuple[str, ...] = ("a",), f: tuple[str, ...] = ("x",)) -> PatchSet:
    return PatchSet(
        trainer="Trainer",
        patches=[
            Patch(name="run", target="trainer_of_this_test:run", reason="r", parameters=run,
                  make=lambda original: lambda a, b: original(a, b) + 1),
            Patch(name="f", target="trainer_of_this_test:C.f", reason="r", parameters=f,
                  make=lambda original: lambda self, x: original(self, x) * 2),
            Patch(name="gone", target="trainer_of_this_test:gone", reason="r", optional=True,
                  make=lambda original: original),
        ],
    )  # fmt: skip


def test_patches_are_applied_and_undone(target: Any) -> None:
    run, f = target.run, target.C.f
    with patches().active() as applied:
        assert target.run(1, 2) == 4
        assert target.C().f(3) == 6
        assert [s.line().split(": ")[1].split(";")[0] for s in applied.check()] == [
            "applied", "applied", "not needed in this version",
        ]  # fmt: skip
    assert target.run is run
    assert target.C.f is f


def test_one_wrong_signature_leaves_everything_alone(target: Any) -> None:
    run = target.run
    with pytest.raises(AdapterError, match=r"looked for parameters \['y'\], found \['self', 'x'\]"):
        patches(f=("y",)).apply()
    assert target.run is run


def test_a_version_outside_the_table_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda: "0.12.3")
    with pytest.raises(AdapterError, match=r"0\.12\.3 is installed, tested are 0\.16"):
        versions.require_tested()
    assert versions.require_tested(allow_untested=True) == "0.12.3"


def test_stand_ins_say_why_and_where_and_refuse_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len({p.name for p in standins.PIECES}) == len(standins.PIECES)
    assert all(p.reason and p.call_sites for p in standins.PIECES)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(AdapterError, match="a GPU was found"):
        standins.install()


def test_placements_of_one_rank_go_to_an_attention_that_packs_by_itself() -> None:
    """Transformer Engine's needs CUDA: a class of its name records what it is given."""
    pytest.importorskip("megatron.core")
    from megatron_dcp.adapters.megatron.attention import packed_params, plan_aware_core
    from megatron_dcp.dist import local_context

    given: dict[str, Any] = {}

    class TEDotProductAttention(torch.nn.Module):
        def __init__(self, config: Any, layer_number: int) -> None:
            super().__init__()

        def forward(self, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
            given.update(kwargs, rows=len(query))
            return query.flatten(1)

    config = types.SimpleNamespace(kv_channels=8, context_parallel_size=2)
    core = plan_aware_core(TEDotProductAttention)(config, layer_number=1)
    context = local_context([5, 1, 3])
    q = torch.randn(12, 2, 8)  # three rows of padding
    out = core(q, q, q, None, packed_seq_params=packed_params(context, 12))
    params = given["packed_seq_params"]
    assert given["rows"] == 9
    assert params.cu_seqlens_q.tolist() == [0, 5, 6, 9]
    assert (params.qkv_format, params.max_seqlen_q, params.local_cp_size) == ("thd", 5, 1)
    assert out.shape == (12, 16)
    assert torch.equal(out[9:], torch.zeros(3, 16))
