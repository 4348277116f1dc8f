"""A quick cost profile of this model on these ranks, fitted at the start of `mdcp train`.

Times a few packs forward and backward on every rank at once (so that shared caches and memory are
loaded as in training), with and without recomputation, and a few messages of the degree-2 size over
the same wire, link model included. The linear, attention and overhead coefficients are fitted by
robust non-negative least squares; memory is counted with saved-tensor hooks. All ranks take the
profile of rank 0, so plans agree.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_dcp.cost import (
    CostModel,
    CostProfile,
    Link,
    Mode,
    ModelShape,
    Pack,
    sample_pack,
)
from megatron_dcp.cost.fit import Fit, fit
from megatron_dcp.cost.profile import Overhead, Overlap, RecomputeFraction
from megatron_dcp.dist import DataWorld, PlacementContext, local_context, make_context
from megatron_dcp.plan import Placement, Topology

RunPack = Callable[[PlacementContext, int], None]  # (context, recomputed layers)

# Lengths of each timed pack: short samples (linear term, overhead) to long ones (attention).
PACKS: tuple[tuple[int, ...], ...] = (
    (64,) * 4,
    (128,) * 16,
    (512,) * 4,
    (2048,),
    (4096,),
    (8192,),
)
RECOMPUTE_PACKS: tuple[tuple[int, ...], ...] = ((128,) * 16, (512,) * 4, (4096,))
MESSAGE_BYTES = (1 << 12, 1 << 16, 1 << 19, 1 << 21)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeFit:
    """us per token, us per pair, us per microbatch; extra fractions under full recompute."""

    linear: float
    attention: float
    overhead: float
    recompute_linear: float
    recompute_attention: float
    error: float
    points: int


def fit_compute(
    world: DataWorld, run: RunPack, layers: int, max_length: int, repeats: int = 2
) -> ComputeFit:
    """Time the packs (those that max_length allows) and fit the three compute terms."""
    packs = _packs(PACKS, max_length, least=4)
    _time_pack(world, run, packs[-1], 0, 1)  # allocator and page faults
    plain = [_time_pack(world, run, p, 0, repeats) for p in packs]
    base = fit([_features(p) for p in packs], plain)
    linear, attention, overhead = base.coefficients
    again = _packs(RECOMPUTE_PACKS, max_length, least=2)
    extra = [
        max(_time_pack(world, run, p, layers, repeats) - _predict(base, p), 1.0) for p in again
    ]
    rows = np.array([[linear * _features(p)[0], attention * _features(p)[1]] for p in again])
    fractions = fit(rows, extra).coefficients
    return ComputeFit(
        linear=linear, attention=attention, overhead=overhead,
        recompute_linear=fractions[0], recompute_attention=fractions[1],
        error=base.median_error, points=len(packs) + len(again),
    )  # fmt: skip


def _packs(
    wanted: Sequence[tuple[int, ...]], max_length: int, *, least: int
) -> list[tuple[int, ...]]:
    """The packs that max_length allows, filled up with packs of longest samples."""
    packs = [p for p in wanted if max(p) <= max_length]
    longest = [(max_length,) * n for n in (1, 4, 16, 64)]
    return packs + longest[: max(least - len(packs), 0)]


def _features(lengths: Sequence[int]) -> list[float]:
    return [float(sum(lengths)), float(sum(n * (n + 1) // 2 for n in lengths)), 1.0]


def _predict(base: Fit, lengths: Sequence[int]) -> float:
    return float(np.dot(base.coefficients, _features(lengths)))


def _time_pack(
    world: DataWorld, run: RunPack, lengths: Sequence[int], recompute: int, repeats: int
) -> float:
    """Median over repeats of the mean over ranks, us; the ranks start together.

    Packs of a few hundred tokens are run once more first: they would time the caches otherwise.
    """
    times = []
    warm = 1 if sum(lengths) < 1024 else 0
    for i in range(repeats + warm):
        context = local_context(lengths, world=world)
        if world.size > 1:
            world.rendezvous(0, world.size)
        _drain(world)
        begin = time.perf_counter_ns()
        run(context, recompute)
        _drain(world)
        if i >= warm:
            times.append((time.perf_counter_ns() - begin) / 1000)
    return _rank_mean(world, float(np.median(times)))


def _drain(world: DataWorld) -> None:
    """Let a GPU finish what is queued, so that the clock sees it."""
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def _rank_mean(world: DataWorld, value: float) -> float:
    if world.size == 1:
        return value
    pacer, world.wire.pacer = world.wire.pacer, None
    try:
        total = torch.tensor([value], dtype=torch.float64, device=world.device)
        return float(world.wire.all_reduce(total, world.group, "agree")[0]) / world.size
    finally:
        world.wire.pacer = pacer


def fit_link(world: DataWorld, repeats: int = 5) -> tuple[float, float]:
    """(us per byte, us per message) of an exchange in which every rank sends to the next."""
    if world.size == 1:
        return 0.0, 0.0
    to, source = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    times = []
    for nbytes in MESSAGE_BYTES:
        out = torch.zeros(nbytes, dtype=torch.uint8, device=world.device)
        got = torch.empty_like(out)
        taken = []
        for _ in range(repeats):
            world.rendezvous(0, world.size)
            _drain(world)
            begin = time.perf_counter_ns()
            world.wire.start_exchange([(out, to)], [(got, source)], world.group, "agree").wait()
            _drain(world)
            taken.append((time.perf_counter_ns() - begin) / 1000)
        times.append(_rank_mean(world, float(np.median(taken))))
    per_byte, latency = fit([[float(n), 1.0] for n in MESSAGE_BYTES], times).coefficients
    return per_byte, latency


OVERLAP_PACKS: tuple[tuple[int, ...], ...] = ((8192,), (4096,))


def fit_overlap(
    world: DataWorld, run: RunPack, profile: CostProfile, max_length: int
) -> tuple[Overlap, float]:
    """How much of the attention time hides each scheme's communication, on this wire as it is.

    Times long packs shared by ranks 0 and 1 under every scheme; the overlap is what the measured
    time saves over compute + communication, per attention time. Returns the largest relative error
    of a fitted point as well.
    """
    if world.size < 2:
        return Overlap(), 0.0
    world.ensure_groups([(0, 2)])
    cost = CostModel(profile, Topology(data_ranks=world.size, ranks_per_node=world.size))
    packs = [p for p in OVERLAP_PACKS if max(p) <= max_length] or [(max_length,)]
    found: dict[str, float] = {}
    worst = 0.0
    for mode in (Mode("ulysses", 2), Mode("ring", 1), Mode("allgather", 1)):
        rows, saved, times = [], [], []
        for lengths in packs:
            pack = sum((sample_pack(profile, n) for n in lengths), Pack())
            linear, attention, comm = cost.parts_us(pack, 2, mode, 0)
            measured = _time_shared(world, run, lengths, mode)
            rows.append(attention)
            saved.append(linear + attention + comm + cost.overhead_us - measured)
            times.append(measured)
        base = sum(a * a for a in rows)  # 0: packs so short that no attention time was fitted
        share = sum(a * b for a, b in zip(rows, saved, strict=True)) / base if base else 0.0
        found[mode.scheme] = min(max(share, 0.0), 1.0)
        for attention, gain, measured in zip(rows, saved, times, strict=True):
            worst = max(worst, abs(gain - found[mode.scheme] * attention) / measured)
    return Overlap(**found), worst


def _time_shared(world: DataWorld, run: RunPack, lengths: Sequence[int], mode: Mode) -> float:
    """us of a pack on ranks 0 and 1 together under a scheme; the other ranks wait."""
    placement = Placement(
        slot=0, first_rank=0, degree=2, samples=tuple(range(len(lengths))), scheme=mode.scheme,
        inner_degree=mode.inner_degree,
    )  # fmt: skip
    taken = 0.0
    if world.rank < 2:
        context = make_context(world, placement, lengths)
        world.rendezvous(0, 2)
        _drain(world)
        begin = time.perf_counter_ns()
        run(context, 0)
        _drain(world)
        taken = (time.perf_counter_ns() - begin) / 1000
    return _rank_mean(world, taken) * world.size / 2


def count_kept_bytes(
    world: DataWorld, run: RunPack, parameters: Sequence[Tensor], layers: int
) -> tuple[float, float]:
    """(bytes per token with all activations kept, bytes per token with all layers recomputed).

    Counts the distinct storages that autograd saves, parameters left out.
    """
    owned = {p.untyped_storage().data_ptr() for p in parameters}
    lengths = (512,) * 4
    out = []
    for recompute in (0, layers):
        seen: dict[int, int] = {}

        def pack(x: Tensor, seen: dict[int, int] = seen) -> Tensor:
            storage = x.untyped_storage()
            if storage.data_ptr() not in owned:
                seen[storage.data_ptr()] = storage.nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            run(local_context(lengths, world=world), recompute)
        out.append(sum(seen.values()) / sum(lengths))
    return out[0], out[1]


def build_profile(
    *,
    name: str,
    shape: ModelShape,
    compute: ComputeFit,
    links: Sequence[Link],
    kept: float,
    recomputed: float,
    budget_tokens: int | None,
    overlap: Overlap,
) -> CostProfile:
    """Put the fitted terms into a profile.

    budget_tokens: the budget holds one sample of so many tokens on one rank without recompute
    (None: no limit worth the name, 64 GB).
    """
    checkpoint = float(shape.hidden * shape.element_bytes)
    # Non-reentrant checkpointing keeps a layer's input outside of autograd's saved tensors, so what
    # is counted with every layer recomputed is what lies outside the layers.
    outside = recomputed
    per_layer = max((kept - outside) / shape.layers, checkpoint)
    profile = CostProfile(
        name=name,
        model=shape,
        pairs="causal",
        linear_us_per_token=compute.linear,
        attn_us_per_pair=compute.attention,
        recompute_fraction=RecomputeFraction(
            linear=compute.recompute_linear, attention=compute.recompute_attention, comm=0.5
        ),
        overhead_us=Overhead(async_=compute.overhead, lockstep=compute.overhead),
        links=tuple(links),
        overlap=overlap,
        kept_bytes_per_token_layer=per_layer,
        checkpoint_bytes_per_token_layer=checkpoint,
        working_bytes_per_token=outside,
        budget_bytes=64_000_000_000,
        fit={"median_error": compute.error, "points": compute.points},
    )
    if budget_tokens is None:
        return profile
    per_token = per_layer * shape.layers + outside
    return profile.with_budget(int(per_token * budget_tokens) + 1)
