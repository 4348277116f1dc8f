"""Transformers models, `transformers.Trainer` and TRL's `SFTTrainer` on the real packages.

Models: gradients of one step under a random plan (any degree, scheme and recomputation) against the
stock model run sample by sample. The arithmetic is fp32 (norms and RoPE force it): a gradient may
differ by the rounding of sums taken in another order, some 1e-6 of its tensor's largest entry.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch

from megatron_dcp.adapters.hf import MdcpTrainerMixin, prepare
from megatron_dcp.adapters.hf.data import CollatedDataset
from megatron_dcp.dispatch.samples import ReadOptions, read_sample
from megatron_dcp.dist import packed
from megatron_dcp.errors import AdapterError, ConfigError
from megatron_dcp.observe.events import read_events
from megatron_dcp.observe.summary import load_summary
from megatron_dcp.plan import load
from megatron_dcp.testing.cases.hf import forget_rope
from megatron_dcp.testing.hf_models import MODELS, tiny_model
from megatron_dcp.testing.pool import WorkerError, WorkerPool

MODEL = "megatron_dcp.testing.cases.hf:model_case"
TRAINER = "megatron_dcp.testing.cases.trainers:trainer_case"
NIGHTLY = {"mistral", "phi3", "olmo2", "granite", "cohere", "qwen3-moe", "jetmoe"}
_TINY: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip
_OPT: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2, "word_embed_proj_dim": 32,
}  # fmt: skip
STEP = 0.1  # learning rate at which a parameter may move apart by 2.4e-7


def model_names() -> list[Any]:
    return [
        pytest.param(n, marks=[pytest.mark.nightly] if n in NIGHTLY else []) for n in sorted(MODELS)
    ]


def check_model(results: list[dict[str, Any]], name: str) -> None:
    for r in results:
        assert r["error"] <= 4e-6, (name, r["where"], r["error"])
        assert STEP * r["absolute"] <= 2.4e-7
        assert r["loss_error"] <= 5e-7
        assert r["kv_groups"][0] == r["kv_groups"][1]
    assert max(d for r in results for d in r["degrees"]) > 1


@pytest.mark.parametrize("name", model_names())
def test_gradients_of_models(pool2: WorkerPool, name: str) -> None:
    check_model(pool2.run(2, MODEL, name=name, seed=3), name)


def test_padded_samples(pool2: WorkerPool) -> None:
    check_model(pool2.run(2, MODEL, name="llama", seed=3, quantum=16), "llama")


def test_a_router_loss_refuses_padding(pool2: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="shape_quantum"):
        pool2.run(2, MODEL, name="mixtral", seed=3, quantum=16)


@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral", "llama-dynamic"])
def test_gradients_on_four_ranks(pool4: WorkerPool, name: str) -> None:
    """Degrees above the number of KV heads too: they are replicated, never overwritten."""
    check_model(pool4.run(4, MODEL, name=name, seed=4), name)


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_gradients_with_transformers_own_checkpointing(
    pool2: WorkerPool, name: str, wrapper: str
) -> None:
    """The placement reaches a recomputed layer; losses are taken in chunks of four tokens."""
    results = pool2.run(
        2, MODEL, name=name, seed=3, wrapper=wrapper, checkpointing=True, chunk_tokens=4
    )
    check_model(results, name)
    assert all(r["fused"] for r in results)


def check_trainer(results: list[dict[str, Any]], backend: str) -> None:
    for r in results:
        assert r["backend"] == backend
        assert r["error"] <= 2.4e-7
        wanted = [0.0 if math.isnan(x) else x for x in r["wanted"]]
        assert r["losses"] == pytest.approx(wanted, abs=3e-6)
        assert "mdcp_idle" in r["metrics"]
    assert results[0]["losses"] == results[1]["losses"]


@pytest.mark.parametrize("trainer", ["transformers", "trl"])
def test_trainers_follow_the_stock_model(pool2: WorkerPool, trainer: str) -> None:
    """Whole `train()` runs, clipping and a short last batch included."""
    results = pool2.run(2, TRAINER, seed=3, trainer=trainer, checkpointing=trainer == "trl")
    check_trainer(results, "ddp")
    assert [len(b) for b in results[0]["digest_of_batches"]] == [8, 8, 3]
    assert results[0]["epoch"] == 1.0


def test_callback_leaves_a_run_directory(pool2: WorkerPool, tmp_path: Path) -> None:
    """Events of both ranks, every plan, and a summary whose losses are the logged ones."""
    results = pool2.run(2, TRAINER, seed=3, run=str(tmp_path))
    check_trainer(results, "ddp")
    summary = load_summary(tmp_path)["strategies"]["dcp"]
    assert summary["loss"] == pytest.approx(results[0]["losses"], abs=1e-5)
    assert 0.0 <= summary["idle"] < 1.0
    assert {e["rank"] for e in read_events(tmp_path)} == {0, 1}
    plans = [load(p) for p in sorted((tmp_path / "plans").glob("*.json"))]
    assert [p.step for p in plans] == [0, 1, 2]


@pytest.mark.parametrize("backend", ["fsdp2", "zero1", "zero2", "zero3"])
def test_trainer_on_sharded_backends(pool2: WorkerPool, backend: str) -> None:
    accumulation = 2 if backend == "fsdp2" else 1
    results = pool2.run(2, TRAINER, seed=3, backend=backend, accumulation=accumulation)
    check_trainer(results, backend)


def test_trainer_resumes_exactly(pool2: WorkerPool, tmp_path: Path) -> None:
    """A run stopped after two steps and resumed gives the losses of an uninterrupted one."""
    whole = pool2.run(2, TRAINER, seed=5, epochs=2)
    pool2.run(2, TRAINER, seed=5, epochs=2, stop_at=2, directory=str(tmp_path))
    resumed = pool2.run(2, TRAINER, seed=5, epochs=2, resume=2, directory=str(tmp_path))
    assert resumed[0]["steps"] == whole[0]["steps"]
    assert resumed[0]["losses"] == whole[0]["losses"]
    check_trainer(resumed, "ddp")


def test_evaluation_outside_a_plan_is_stock() -> None:
    """Padded batches, without a placement, give what SDPA gives."""
    model, stock = tiny_model("llama", seed=1), tiny_model("llama", seed=1, attention="sdpa")
    prepare(model)
    ids = torch.randint(3, 64, (2, 9))
    mask = torch.tensor([[1] * 9, [1] * 5 + [0] * 4])
    with torch.no_grad():
        found = model.eval()(input_ids=ids, attention_mask=mask).logits
        wanted = stock.eval()(input_ids=ids, attention_mask=mask).logits
    assert torch.equal(found[mask.bool()], wanted[mask.bool()])


def test_training_outside_a_plan_is_refused() -> None:
    model = tiny_model("llama")
    prepare(model)
    with pytest.raises(AdapterError, match="outside a microbatch"):
        model(input_ids=torch.ones(1, 4, dtype=torch.long))


def test_dynamic_rope_forgets_other_samples() -> None:
    """A pack gives each sample the frequencies of its own length, before and after a long one."""
    model, stock = tiny_model("llama-dynamic", seed=2), tiny_model("llama-dynamic", seed=2)
    prepare(model)
    lengths = [5, 40, 6, 12]
    ids = torch.randint(3, 64, (sum(lengths),))
    with torch.no_grad():
        with packed(lengths) as pack:
            found = model(input_ids=ids[None], position_ids=pack.position_ids[None]).logits[0]
        for part, rows in zip(ids.split(lengths), found.split(lengths), strict=True):
            forget_rope(stock)
            torch.testing.assert_close(rows, stock(input_ids=part[None]).logits[0])


def test_dynamic_rope_of_documents_inside_a_sample() -> None:
    """Each document is one of its own length at its own positions, and sees no other."""
    model, stock = tiny_model("llama-dynamic", seed=2), tiny_model("llama-dynamic", seed=2)
    prepare(model)
    documents = [5, 40, 6, 12]
    ids = torch.randint(3, 64, (sum(documents),))
    positions = torch.cat([torch.arange(n) for n in documents])
    with torch.no_grad():
        with packed([45, 18], documents=[[5, 40], [6, 12]]):
            found = model(input_ids=ids[None], position_ids=positions[None]).logits[0]
        for part, rows in zip(ids.split(documents), found.split(documents), strict=True):
            forget_rope(stock)
            torch.testing.assert_close(rows, stock(input_ids=part[None]).logits[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_dropout": 0.1}, "dropout"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
    ],
)
def test_models_that_depend_on_the_plan_are_refused(changes: Any, message: str) -> None:
    model = tiny_model("llama")
    for key, value in changes.items():
        setattr(model.config, key, value)
    with pytest.raises(AdapterError, match=message):
        prepare(model)


def test_random_draws_of_modules_are_refused() -> None:
    """A dropout that only the LoRA layers or a function call have, noise on a router."""
    import peft
    import transformers

    def lora(p: float) -> Any:
        config = peft.LoraConfig(r=2, lora_dropout=p, target_modules=["q_proj"])
        return peft.get_peft_model(tiny_model("llama"), config)

    with pytest.raises(AdapterError, match=r"q_proj\.lora_dropout.* and 1 more modules.*: 0\.1"):
        prepare(lora(0.1))
    prepare(lora(0.1), allow_dropout=True)
    prepare(lora(0.0))
    config = peft.LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj"])
    base = tiny_model("llama")
    prepare(base)
    with pytest.raises(AdapterError, match=r"lora_dropout"):
        prepare(peft.get_peft_model(base, config))
    with pytest.raises(AdapterError, match=r"jitter_noise=0\.1"):
        prepare(tiny_model("mixtral", router_jitter_noise=0.1), allow_dropout=True)
    phimoe = transformers.PhimoeConfig(**_TINY, num_local_experts=2, router_jitter_noise=0.0)
    with pytest.raises(AdapterError, match="sparsemixer"):
        prepare(transformers.PhimoeForCausalLM(phimoe))
    opt = transformers.OPTConfig(**_OPT, dropout=0.0, layerdrop=0.2)
    with pytest.raises(AdapterError, match=r"layerdrop=0\.2"):
        prepare(transformers.OPTForCausalLM(opt), allow_dropout=True)
    seed = transformers.SeedOssConfig(**_TINY, head_dim=16)
    with pytest.raises(AdapterError, match=r"'residual_dropout': 0\.1"):
        prepare(transformers.SeedOssForCausalLM(seed))


def test_models_that_see_the_next_token_are_refused() -> None:
    """Labels are shifted by one: a masked language model would learn something else."""
    import transformers

    config = {k: v for k, v in _TINY.items() if k != "num_key_value_heads"}
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    with pytest.raises(AdapterError, match="masked language model"):
        prepare(transformers.BertForMaskedLM(transformers.BertConfig(**config)))
    with pytest.raises(AdapterError, match="is_decoder=False"):
        prepare(transformers.BertLMHeadModel(transformers.BertConfig(**config)))
    prepare(transformers.BertLMHeadModel(transformers.BertConfig(**config, is_decoder=True)))


def test_every_coefficient_of_a_router_loss_is_found() -> None:
    assert prepare(tiny_model("jetmoe")).router == (0.02, 4, 2)
    assert prepare(tiny_model("jetmoe", aux_loss_coef=0.0)).router is None
    model = tiny_model("llama")
    model.config.output_router_logits = True
    with pytest.raises(AdapterError, match="names no coefficient"):
        prepare(model)


def test_only_transformers_models_are_prepared() -> None:
    with pytest.raises(AdapterError, match=r"mdcp\.attention"):
        prepare(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ({"train_sampling_strategy": "group_by_length"}, "group_by_length"),
        ({"train_sampling_strategy": "batch_rebalance"}, "batch_rebalance"),
        ({"neftune_noise_alpha": 5.0}, r"neftune_noise_alpha=5\.0"),
        ({"packing": True}, "the planner packs"),
        ({"loss_type": "dft"}, "loss_type='dft'"),
        ({"activation_offloading": True}, "activation_offloading=True"),
    ],
)
def test_trainer_settings_that_plans_change_are_refused(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    from transformers import Trainer, TrainingArguments

    class Planned(MdcpTrainerMixin, Trainer):
        pass

    of_trl = ("packing", "loss_type", "activation_offloading")
    trl = {k: v for k, v in arguments.items() if k in of_trl}
    own = {k: v for k, v in arguments.items() if k not in trl}
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", **own)
    for name, value in trl.items():  # as an SFTConfig has them
        setattr(args, name, value)
    with pytest.raises(AdapterError, match=message):
        Planned(model=tiny_model("llama"), args=args)
    with pytest.raises(ConfigError, match="unknown"):
        Planned(model=tiny_model("llama"), args=args, mdcp={"stratgey": "dcp"})


@pytest.mark.parametrize("fields", [("position_ids",), ("seq_idx",), ("cu_seq_lens_q",)])
def test_rows_packed_beforehand_keep_their_documents(fields: tuple[str, ...]) -> None:
    """Rows as TRL packs and collates them; without boundaries documents would see each other."""
    from datasets import Dataset
    from trl import pack_dataset
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    documents = Dataset.from_dict({"input_ids": [[5] * n for n in (6, 4, 3, 7)]})
    rows = pack_dataset(documents, seq_length=10)
    whole = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)

    def collate(items: list[Any]) -> dict[str, Any]:
        return {k: v for k, v in whole(items).items() if k in ("input_ids", "labels", *fields)}

    found = CollatedDataset(rows, collate)
    assert [found[i]["documents"] for i in range(2)] == rows["seq_lengths"]
    for i, lengths in enumerate(rows["seq_lengths"]):
        wanted = [t for n in lengths for t in range(n)]
        assert found[i]["position_ids"].tolist() == wanted
        sample = read_sample(found, i, sum(lengths), ReadOptions())
        assert sample.documents == tuple(lengths)


def test_a_step_of_packed_rows_is_that_of_their_documents(tmp_path: Path) -> None:
    """TRL's padding-free collator on rows packed beforehand, against the documents one by one."""
    from datasets import Dataset
    from trl import pack_dataset

    ids = [torch.randint(3, 64, (n,)).tolist() for n in (6, 4, 3, 7)]
    documents = Dataset.from_dict({"input_ids": ids})
    trained = []
    for data in (documents, pack_dataset(documents, seq_length=10)):
        trainer = planned(tmp_path, data, len(data), max_steps=1)
        trainer.train()
        trained.append(dict(trainer.model.named_parameters()))
    for name, p in trained[0].items():
        torch.testing.assert_close(trained[1][name], p, rtol=0.0, atol=2.4e-7)


def planned(path: Path, data: Any, batch: int, **arguments: Any) -> Any:
    """A Trainer of this process alone, with TRL's collator; plain steps of SGD."""
    from transformers import Trainer, TrainingArguments
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    class Planned(MdcpTrainerMixin, Trainer):
        pass

    args = TrainingArguments(
        str(path), per_device_train_batch_size=batch, learning_rate=0.1, optim="sgd",
        lr_scheduler_type="constant", logging_steps=1, save_strategy="no", use_cpu=True,
        report_to="none", remove_unused_columns=False, dataloader_pin_memory=False, **arguments,
    )  # fmt: skip
    return Planned(
        model=tiny_model("llama", seed=4), args=args, train_dataset=data,
        data_collator=DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True),
        mdcp={"cost": "a100-gpt7b"},
    )  # fmt: skip


def test_training_goes_on_in_a_second_call(tmp_path: Path) -> None:
    """With more steps, and with another data set: each is what a new trainer does with it."""
    from datasets import Dataset

    ids = [torch.randint(3, 64, (n,)).tolist() for n in (6, 4, 3, 7, 5, 8)]
    first, second = (Dataset.from_dict({"input_ids": x}) for x in (ids[:4], ids[2:]))
    trainer = planned(tmp_path, first, 2, max_steps=1)
    trainer.train()
    trainer.args.max_steps = 3
    for data in (first, second):
        trainer.train_dataset = data
        new = planned(tmp_path, data, 2, max_steps=3)
        new.model.load_state_dict(trainer.model.state_dict())
        losses = []
        for each in (trainer, new):
            each.train()
            assert each.state.global_step == 3
            losses.append([h["loss"] for h in each.state.log_history if "loss" in h][-3:])
        assert losses[0] == losses[1]


def test_padding_and_single_documents_are_no_boundaries() -> None:
    row = {
        "input_ids": torch.tensor([[0, 0, 5, 6, 7, 8, 0]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 0]]),
        "position_ids": torch.tensor([[1, 1, 0, 1, 0, 1, 1]]),
    }

    def item(**changes: Any) -> dict[str, Any]:
        return CollatedDataset([{}], lambda _: {**row, **changes})[0]

    assert item()["documents"] == [2, 2]
    assert item()["position_ids"].tolist() == [0, 1, 0, 1]
    alone = item(position_ids=torch.tensor([[1, 1, 0, 1, 2, 3, 1]]))
    assert "documents" not in alone
    assert alone["position_ids"].tolist() == [0, 1, 2, 3]
    images = item(position_ids=torch.zeros(3, 1, 7))
    assert sorted(images) == ["input_ids"]
    with pytest.raises(AdapterError, match="jump"):
        item(position_ids=torch.tensor([[1, 1, 0, 1, 5, 6, 1]]))
    with pytest.raises(AdapterError, match="attention_mask"):
        item(attention_mask=torch.tensor([[1, 1, 1, 2, 2, 2, 0]]))
    with pytest.raises(AdapterError, match="attention_mask"):
        item(attention_mask=torch.ones(1, 1, 7, 7))
    with pytest.raises(AdapterError, match="covers 5 tokens"):
        item(cu_seq_lens_q=torch.tensor([0, 2, 5]))


def test_a_loss_or_step_that_would_not_be_called_is_refused(tmp_path: Path) -> None:
    """A distillation loss in `compute_loss` would train plain cross-entropy without a word."""
    from transformers import Trainer, TrainingArguments

    class Weighted(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError

    class Stepping(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError

    class Own(MdcpTrainerMixin, Weighted):
        def mdcp_loss(self, model: Any, step: Any, mb: Any) -> Any:
            raise NotImplementedError

    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    for base, message in (
        (Weighted, r"Weighted\.compute_loss: .* override mdcp_loss"),
        (Stepping, r"Stepping\.training_step: .* before MdcpTrainerMixin"),
    ):
        planned = type("Planned", (MdcpTrainerMixin, base), {})
        with pytest.raises(AdapterError, match=message):
            planned(model=tiny_model("llama"), args=args)
    Own(model=tiny_model("llama"), args=args)
