"""`dcp-inter` and `dcp-intra`: the two variants of the Data-Centric Parallel paper.

Source: "Data-Centric Parallel" (paper of 2026), as a method for the given global batch. Buckets are
samples of one shape (`planner.buckets` says what a bucket of text is); a profile gives each bucket
its degree and batch by throughput (`planner.bucket_profile`). Wide batches are enqueued first, on
disjoint groups of ranks; degree and batch stay, and each group gets as many accumulation steps as
make the group times meet: the next batch goes to the group of its degree that is free first,
longest batches leading, which balances the makespan. `dcp-intra` adds adaptive recomputation: as
few layers per batch as memory needs, where `dcp-inter` recomputes none or all.

The original samples its own batches until group times meet. The given batch fixes the samples, so
these candidates are planned and the fastest is kept: the profile as it is, or limited to the mean
load, a half or a quarter of it (a degree so small that one sample outlasts the step helps nobody);
batches full, half or quarter; for `dcp-intra` the profile with and without adaptive recomputation.
Lockstep also tries slots filled by batches of like times. With the parameter `profile` the profiled
degree and batch stay as they are, to the letter of the paper, which is never faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from megatron_dcp.errors import ConfigError
from megatron_dcp.plan import Placement
from megatron_dcp.planner.bucket_profile import BucketProfiler
from megatron_dcp.planner.buckets import batches_of, buckets_of
from megatron_dcp.planner.packing import best_of
from megatron_dcp.planner.pricing import Pricer, place_slots
from megatron_dcp.planner.registry import Draft, PlanRequest
from megatron_dcp.planner.waves import Group, fill_slots, list_schedule

FRACTIONS = (1, 2, 4)


def dcp_inter(request: PlanRequest, parameter: str | None) -> Draft:
    """Bare or `:profile`. Raises PlanError when a sample fits no degree."""
    return _plan(request, "dcp-inter", parameter, adaptive=False)


def dcp_intra(request: PlanRequest, parameter: str | None) -> Draft:
    """Bare or `:profile`. Raises PlanError when a sample fits no degree."""
    return _plan(request, "dcp-intra", parameter, adaptive=True)


def _plan(request: PlanRequest, name: str, parameter: str | None, *, adaptive: bool) -> Draft:
    if parameter not in (None, "profile"):
        raise ConfigError(f"strategy {name}:{parameter}: only `profile` may follow the colon")
    pricer = Pricer(request)
    buckets = buckets_of(request.workload)
    drafts: dict[tuple[Group, ...], str] = {}
    if parameter == "profile":
        profiler = BucketProfiler(pricer, adaptive=adaptive)
        groups = make_batches(profiler, buckets, None, 1)
        drafts[tuple(groups)] = f"{name} profile"
    else:
        for profiled in (False, True) if adaptive else (False,):
            profiler = BucketProfiler(pricer, adaptive=profiled)
            for title, groups in _candidates(profiler, buckets):
                least = [0 if adaptive else g.least_recompute for g in groups]
                freed = [replace(g, least_recompute=r) for g, r in zip(groups, least, strict=True)]
                drafts.setdefault(tuple(freed), f"{name} {title}")
    algorithm, placements = best_of(request, _laid_out(pricer, drafts))
    return Draft(placements=placements, algorithm=algorithm)


def _candidates(
    profiler: BucketProfiler, buckets: Sequence[list[int]]
) -> Iterator[tuple[str, list[Group]]]:
    load = _mean_load_us(profiler, buckets)
    for title, limit in (
        ("throughput", None),
        ("mean load", load),
        ("half load", load // 2),
        ("quarter load", load // 4),
    ):
        for fraction in FRACTIONS:
            yield f"{title} 1/{fraction}", make_batches(profiler, buckets, limit, fraction)


def _laid_out(
    pricer: Pricer, drafts: Mapping[tuple[Group, ...], str]
) -> Iterator[tuple[str, list[Placement]]]:
    for groups, title in drafts.items():
        yield title, place_slots(pricer, list_schedule(pricer, groups))
        if pricer.request.lockstep > 1:
            yield f"{title} slots", place_slots(pricer, fill_slots(pricer, groups))


def make_batches(
    profiler: BucketProfiler, buckets: Sequence[list[int]], limit_us: int | None, fraction: int
) -> list[Group]:
    """All batches of the step; a batch holds at most 1/fraction of the profiled batch's tokens."""
    lengths = profiler.pricer.request.workload.lengths
    out = []
    for bucket in buckets:
        config = profiler.best(bucket, limit_us)
        tokens = config.batch * lengths[bucket[0]]
        for batch in batches_of(lengths, bucket, max(1, tokens // fraction)):
            held = sum(lengths[i] for i in batch)
            least = profiler.least_recompute(held, config.degree)
            out.append(Group(config.degree, tuple(batch), least))
    return out


def _mean_load_us(profiler: BucketProfiler, buckets: Sequence[list[int]]) -> int:
    """Rank-time of the profiled batches over N, at least the time that some sample needs anyway."""
    work, floor = 0.0, 0
    for bucket in buckets:
        best = profiler.best(bucket)
        work += best.time_us * best.degree * len(bucket) / best.batch
        floor = max(floor, min(c.time_us for c in profiler.configs(bucket)))
    return max(floor, math.ceil(work / profiler.pricer.topology.data_ranks))
