"""Attention over the grid and the video DiTs over ranks, against dense attention in one process."""

from __future__ import annotations

import itertools
import math
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import megatron_dcp as mdcp
from megatron_dcp.dispatch import ReadOptions, read_sample
from megatron_dcp.dist import DataWorld, make_context, use_placement
from megatron_dcp.plan import Placement
from megatron_dcp.schemes import attention, grid_rows, switch_rows
from megatron_dcp.testing.cases.attention import cached_world, take
from megatron_dcp.testing.cases.gradients import plan_maker, wrap
from megatron_dcp.testing.gradients import gradient_error
from megatron_dcp.testing.plans import tiny_profile
from megatron_dcp.testing.reference import dense_attention

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "video_dit"))
import dit

Shape = tuple[int, int, int]
FEATURES, SEED = 6, 5


def grid_mask(shape: Shape, axis: str | None) -> Tensor:
    """[L, L] bool: which tokens of a clip see each other."""
    index = torch.arange(math.prod(shape))
    area = shape[1] * shape[2]
    if axis is None:
        return torch.ones(len(index), len(index), dtype=torch.bool)
    group = index // area if axis == "space" else index % area
    return group[:, None] == group[None, :]


def block(world: DataWorld, shapes: list[Shape], scheme: str, inner: int, step: int = 0) -> Any:
    """The context of one placement that all ranks of the world share."""
    placement = Placement(
        slot=0, first_rank=0, degree=world.size, samples=tuple(range(len(shapes))),
        scheme=scheme, inner_degree=inner,
    )  # fmt: skip
    world.ensure_groups([(o * inner, inner) for o in range(world.size // inner) if inner > 1])
    lengths = [math.prod(s) for s in shapes]
    return make_context(world, placement, lengths, shapes=shapes, step=step)


def dropped(*, shapes: list[list[int]], scheme: str, inner: int) -> dict[int, list[list[float]]]:
    """What dropout keeps of this rank's tokens, by token: in rows, columns and own rows in turn."""
    world, grids = cached_world(), [tuple(s) for s in shapes]
    ctx = block(world, grids, scheme, inner)
    kept = []
    with use_placement(ctx), mdcp.sample_dropout(SEED):
        for layout in ("space", "time", "own"):
            x = torch.ones(ctx.rows, 3).double()
            x = switch_rows(x, source="own", target=layout)
            x = torch.nn.functional.dropout(x, 0.5, training=True)
            kept.append(switch_rows(x, source=layout, target="own"))
    if ctx.filler:
        return {}
    first = torch.tensor([0, *itertools.accumulate(ctx.lengths)])[ctx.sample_index]
    tokens = (first + ctx.position_ids).tolist()
    return dict(zip(tokens, torch.stack(kept, 1).flatten(1).tolist(), strict=True))


def grid_error(
    *, shapes: list[list[int]], scheme: str, inner: int, axis: str, rows: str, causal: bool = False
) -> dict[str, Any]:
    """Errors of out, dq, dk, dv of this rank's rows against dense attention, and what it sent."""
    world, grids = cached_world(), [tuple(s) for s in shapes]
    ctx = block(world, grids, scheme, inner)
    heads, dim, total = {"q": 4, "k": 2, "v": 2, "dout": 4}, 8, sum(ctx.lengths)
    g = torch.Generator().manual_seed(0)
    whole = {n: torch.randn(total, h, dim, generator=g).double() for n, h in heads.items()}
    want, start = {n: torch.zeros_like(x) for n, x in whole.items()}, 0
    for shape, length in zip(grids, ctx.lengths, strict=True):
        at = slice(start, start + length)
        x = {n: whole[n][at].clone().requires_grad_() for n in ("q", "k", "v")}
        see = grid_mask(shape, axis)
        out = dense_attention(x["q"], x["k"], x["v"], see.tril() if causal else see)
        torch.autograd.backward(out, whole["dout"][at])
        want["dout"][at] = out.detach()
        for n in x:
            want[n][at] = x[n].grad
        start += length
    starts = [sum(ctx.lengths[:j]) for j in range(len(grids))]
    spans = ctx.shards.ranks[ctx.block_rank]
    local = {n: take(x, spans, starts).requires_grad_(n != "dout") for n, x in whole.items()}
    if ctx.filler:
        local = {n: torch.ones(1, *x.shape[1:]).double() for n, x in whole.items()}
        local = {n: x.requires_grad_(n != "dout") for n, x in local.items()}
    before = dict(world.wire.sent)
    q, k, v = (
        switch_rows(local[n], source="own", target=rows, placement=ctx) for n in ("q", "k", "v")
    )
    middle = dict(world.wire.sent)
    out = attention(q, k, v, causal=causal, axis=axis, rows=rows, placement=ctx)
    sent = world.wire.sent["grid"] - middle.get("grid", 0)
    out = switch_rows(out, source=rows, target="own", placement=ctx)
    torch.autograd.backward(out, local["dout"])
    found = {n: local[n].grad for n in ("q", "k", "v")} | {"dout": out.detach()}
    mine = {n: take(x, spans, starts) for n, x in want.items()}
    if ctx.filler:
        mine = {n: torch.zeros_like(local[n]) for n in mine}
    error, where = gradient_error(found, mine)
    return {
        "error": error, "where": where, "tokens": ctx.tokens, "sent": sent,
        "all": world.wire.sent["grid"] - before.get("grid", 0),
        "back": world.wire.sent["grid.backward"] - before.get("grid.backward", 0),
    }  # fmt: skip


def switch_case(*, shapes: list[list[int]], scheme: str, inner: int) -> dict[str, Any]:
    """Which (sample, position) this rank holds in every layout, and that a tour changes nothing."""
    ctx = block(cached_world(), [tuple(s) for s in shapes], scheme, inner)
    own = torch.stack((ctx.sample_index, ctx.position_ids), dim=1)
    held, x, at = {}, own, "own"
    for layout in ("space", "time", "own", "time", "space", "own"):
        x = switch_rows(x, source=at, target=layout, placement=ctx)
        rows = torch.stack(grid_rows(layout, placement=ctx), dim=1)
        assert torch.equal(x, rows) or ctx.filler, (layout, x, rows)
        held[layout] = [] if layout == "own" and ctx.filler else x.tolist()
        at = layout
    return held


class Dense(dit.Planned):
    """The model's calls for one clip in one process, in the plainest way."""

    def __init__(self) -> None:
        self.shape: Shape = (1, 1, 1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, axis: str | None) -> Tensor:
        return dense_attention(q, k, v, grid_mask(self.shape, axis))

    def switch(self, x: Tensor, source: str, target: str) -> Tensor:
        return x

    def sample_index(self, layout: str) -> Tensor:
        return torch.zeros(math.prod(self.shape), dtype=torch.int64)


class Clips:
    """Random patches of random small shapes, images among them."""

    def __init__(self, count: int, seed: int) -> None:
        rng = random.Random(seed)
        self.shapes: list[Shape] = [
            (1 if rng.random() < 0.4 else rng.randint(2, 7), rng.randint(1, 4), rng.randint(1, 4))
            for _ in range(count)
        ]
        self.lengths = [math.prod(s) for s in self.shapes]
        g = torch.Generator().manual_seed(seed)
        self.items = []
        for shape, length in zip(self.shapes, self.lengths, strict=True):
            grid = torch.cartesian_prod(*(torch.arange(n) for n in shape)).view(-1, 3)
            self.items.append({
                "patches": torch.randn(length, FEATURES, generator=g).double(),
                "grid": grid,
                "caption": torch.randint(1, 20, (1, 4), generator=g),
            })  # fmt: skip

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.items[index]


def small_dit(grid: str, seed: int, calls: dit.Planned | None = None) -> dit.VideoDit:
    """float64, every parameter away from its zero initialisation."""
    torch.manual_seed(seed)
    config = dit.DitConfig(
        grid=grid, features=FEATURES, hidden=24, layers=3, heads=4, ffn=32, vocabulary=20
    )  # type: ignore[arg-type]
    model = dit.VideoDit(config, calls).double()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn_like(p)
    return model


def reference_step(
    grid: str, data: Clips, indices: list[int], step: int, seed: int, normalize: str
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the batch, clip by clip in one process with dense attention."""
    calls, world = Dense(), DataWorld(alone=True)
    model = small_dit(grid, seed, calls)
    read = ReadOptions(shift=False, normalize=normalize, per_sample=("caption",))
    items = [read_sample(data, i, data.lengths[i], read) for i in indices]
    total, value = sum(float(s.weights.sum()) for s in items), 0.0
    for index, item in zip(indices, items, strict=True):
        calls.shape = data.shapes[index]
        placement = Placement(slot=0, first_rank=0, degree=1, samples=(0,))
        context = make_context(world, placement, [item.length], sample_keys=[index], step=step)
        inputs = {**item.inputs, **item.whole}
        with use_placement(context):
            loss = dit.flow_loss_sum(model, inputs, item.weights, seed=SEED, drop_caption=0.5)
            torch.autograd.backward(loss / total)
        value += float(loss.detach()) / total
    return value, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def dit_case(
    *,
    grid: str,
    seed: int,
    samples: int = 8,
    wrapper: str = "bare",
    normalize: str = "token",
    lockstep: str = "auto",
    idle_rank: bool = False,
    strategy: str | None = None,
) -> dict[str, Any]:
    """Gradient error of one step of a DiT under a random plan."""
    data = Clips(samples, seed)
    model = small_dit(grid, seed)
    profile = replace(
        tiny_profile(head_dim=6, kv_heads=4, layers=3), pairs="full" if grid == "1d" else "grid",
        attn_spatial_us_per_pair=0.1, attn_temporal_us_per_pair=0.1,
    )  # fmt: skip
    engine = mdcp.initialize(
        wrap(model, wrapper), None, cost=profile, plan_fn=plan_maker(strategy, seed, idle_rank),
        plan_ahead=0, normalize=normalize, lockstep=lockstep, world=cached_world(),
    )  # fmt: skip
    engine.wrap_layers(model.layers)
    loader = engine.dataloader(
        data, global_batch_size=samples, lengths="lengths", shapes="shapes", seed=seed,
        per_sample=["caption"], shift_labels=False,
    )  # fmt: skip
    step = next(iter(loader))
    for mb in step:
        mb.backward(
            dit.flow_loss_sum(engine.model, mb.inputs, mb.weights, seed=SEED, drop_caption=0.5)
        )
    loss = step.finish()
    expected, grads = reference_step(grid, data, step.indices, step.index, seed, normalize)
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    error, where = gradient_error(found, grads)
    return {
        "error": error, "where": where, "loss": loss,
        "loss_error": abs(loss - expected) / abs(expected),
        "schemes": sorted({p.scheme for p in step.plan.placements}),
        "degrees": sorted({p.degree for p in step.plan.placements}),
        "recomputed": max((p.recompute for p in step.plan.placements), default=0),
        "dummies": sum(mb.dummy for mb in step.microbatches),
        "extra": sorted(set(found) - set(grads)),
    }  # fmt: skip


def noise_case(*, seed: int, plan_seed: int, samples: int = 6) -> dict[str, list[float]]:
    """Noise, time and dropped caption of every token of three steps under random plans, by
    step/sample/position."""
    data = Clips(3 * samples, seed)
    engine = mdcp.initialize(
        small_dit("2d", 0), None, cost=tiny_profile(), plan_fn=plan_maker(None, plan_seed, False),
        plan_ahead=0, recompute="off", world=cached_world(),
    )  # fmt: skip
    loader = engine.dataloader(
        data, global_batch_size=samples, lengths="lengths", shapes="shapes", steps=3,
        per_sample=["caption"], shift_labels=False,
    )  # fmt: skip
    drawn: dict[str, list[float]] = {}
    for step in loader:
        for mb in step:
            index = mb.context.sample_index
            draw = [mdcp.sample_generator(seed=SEED, site=s) for s in range(3)]
            rows = torch.cat((
                draw[dit.NOISE].normal(FEATURES, dtype=torch.float64),
                draw[dit.TIME].of_samples(dtype=torch.float64)[index],
                draw[dit.CAPTION].of_samples(dtype=torch.float64)[index],
            ), dim=1)  # fmt: skip
            ids = zip(mb.context.sample_ids.tolist(), mb.position_ids.tolist(), strict=True)
            if mb.tokens:
                drawn |= {
                    f"{step.index}/{s}/{p}": r.tolist() for (s, p), r in zip(ids, rows, strict=True)
                }
            mb.backward(dit.flow_loss_sum(engine.model, mb.inputs, mb.weights, seed=SEED))
        step.engine.model.zero_grad()
        step.finish()
    return drawn
