"""Transformers models under random plans against the stock model on one process."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import megatron_dcp as mdcp
from megatron_dcp.adapters.hf import microbatch_loss, prepare
from megatron_dcp.testing.cases.attention import cached_world
from megatron_dcp.testing.cases.backends import random_plans
from megatron_dcp.testing.cases.gradients import Samples, random_lengths
from megatron_dcp.testing.gradients import gradient_error
from megatron_dcp.testing.hf_models import tiny_model
from megatron_dcp.testing.plans import tiny_profile


def model_case(
    *,
    name: str,
    seed: int,
    wrapper: str = "bare",
    samples: int = 9,
    checkpointing: bool = False,
    chunk_tokens: int | None = None,
    quantum: int = 0,
    **changes: Any,
) -> dict[str, Any]:
    """Gradient error of one step of a tiny model; wrapper: bare, ddp or fsdp2."""
    data = Samples(random_lengths(seed, samples), seed, masked=0.2)
    stock = tiny_model(name, seed=seed, **changes)
    model = copy.deepcopy(stock)
    groups = kv_groups(model)
    prepared = prepare(model)
    if chunk_tokens is not None and prepared.head is not None:
        prepared.head.chunk_tokens = chunk_tokens
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    wrapped = wrap(model, wrapper)
    engine = mdcp.initialize(
        wrapped, None, cost=profile_of(model), plan_fn=random_plans(seed, False), plan_ahead=0,
        world=cached_world(), recompute="off",
    )  # fmt: skip
    loader = engine.dataloader(
        data, global_batch_size=samples, lengths="lengths", seed=seed, batch_dim=True,
        shape_quantum=quantum,
    )  # fmt: skip
    step = next(iter(loader))
    for mb in step:
        mb.backward(microbatch_loss(prepared, wrapped, step, mb))
    loss = step.finish()
    expected, grads = stock_step(stock, data, step.indices, prepared.router)
    found = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    error, where = gradient_error(found, grads)
    largest = max(float(g.abs().max()) for g in grads.values())
    return {
        "error": error,
        "where": where,
        "absolute": max(float((found[n] - g).abs().max()) for n, g in grads.items()),
        "largest": largest,
        "loss": loss,
        "loss_error": abs(loss - expected) / abs(expected),
        "fused": prepared.head is not None,
        "degrees": sorted({mb.placement.degree for mb in step.microbatches if not mb.dummy}),
        "kv_groups": [groups, kv_groups(model)],
        "router": prepared.router is not None,
    }


def stock_step(
    model: Any, data: Samples, indices: list[int], router: Any
) -> tuple[float, dict[str, Tensor]]:
    """Token-mean loss (and mean balance loss) of the step by the stock model, sample by sample."""
    total: Tensor = torch.zeros(())
    weight = 0.0
    balance: Tensor = torch.zeros(())
    for i in indices:
        ids, labels = data[i]["input_ids"], data[i]["labels"]
        forget_rope(model)
        out = model(input_ids=ids[None], use_cache=False)
        labels = torch.cat([labels[1:], torch.tensor([-100])])
        total = total + nn.functional.cross_entropy(
            out.logits[0].float(), labels, ignore_index=-100, reduction="sum"
        )
        weight += float((labels != -100).sum())
        if router is not None:
            balance = balance + out.aux_loss
    loss = total / max(weight, 1.0)
    if router is not None:
        loss = loss + router[0] * balance / len(indices)
    torch.autograd.backward(loss)
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach()), grads


def forget_rope(model: nn.Module) -> None:
    """A stock model remembers lengths of earlier calls in its rotary embedding; a fresh one not."""
    modules: list[Any] = list(model.modules())
    for module in modules:
        if hasattr(module, "original_inv_freq") and hasattr(module, "original_max_seq_len"):
            module.register_buffer("inv_freq", module.original_inv_freq.clone(), persistent=False)
            module.max_seq_len_cached = module.original_max_seq_len


def kv_groups(model: nn.Module) -> list[int]:
    """`num_key_value_groups` of every attention layer: others' Ulysses overwrites it."""
    modules: list[Any] = list(model.modules())
    return [int(m.num_key_value_groups) for m in modules if hasattr(m, "num_key_value_groups")]


def profile_of(model: Any) -> Any:
    """A cost profile with the head counts of a tiny model."""
    config = model.config.get_text_config()
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    return tiny_profile(heads=heads, kv_heads=kv_heads, layers=int(config.num_hidden_layers))


def wrap(model: Any, wrapper: str) -> nn.Module:
    if wrapper == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if wrapper == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for layer in model.get_decoder().layers:
            fully_shard(layer)
        fully_shard(model)
    wrapped: nn.Module = model
    return wrapped


def whole(x: Any) -> Tensor:
    full: Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return full
