"""`dcp-intra-2024`: the earlier variant of the authors' page, without gradient accumulation.

Source: the project page of Data-Centric Parallel (2024) and its description of DCP-intra. Rounds of
one batch per group: full batches of the profiled degree (`planner.bucket_profile`, recomputation a
switch) are enqueued wide first until all ranks are used. Then the other groups are matched to the
fastest one: first a smaller batch, then a doubled degree, as long as that brings the group's time
nearer. Groups that no longer find ranks go back to their bucket, narrowest first, and batches grow
again up to the time of the slowest group. Ranks that stay idle widen the slowest groups while that
makes them faster.

A batch that empties its bucket is no measure of the fastest (it may be a single short sample). A
round keeps its unmatched form where that does more work per rank-time. Rounds follow each other
without a barrier in async mode and are slots in lockstep. No parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_dcp.planner.bucket_profile import BucketConfig, BucketProfiler
from megatron_dcp.planner.buckets import buckets_of
from megatron_dcp.planner.packing import best_of
from megatron_dcp.planner.pricing import Pricer, place_slots
from megatron_dcp.planner.registry import Draft, PlanRequest
from megatron_dcp.planner.waves import Group, WaveLayout, fits_topology

NEVER_US = 1 << 62


@dataclass(frozen=True, slots=True)
class _Cut:
    """One group of a round: the next `batch` samples of a bucket on `degree` ranks."""

    bucket: int
    degree: int
    batch: int


def dcp_intra_2024(request: PlanRequest, parameter: str | None) -> Draft:
    """Raises PlanError when a sample fits no degree."""
    drafts = []
    for matching in (True, False):
        pricer = Pricer(request)
        rounds = _Rounds(BucketProfiler(pricer, adaptive=False), matching=matching)
        layout = WaveLayout(pricer)
        while rounds.left():
            layout.add(rounds.next())
        title = "matched" if matching else "unmatched"
        drafts.append((f"dcp-intra-2024 {title}", place_slots(pricer, layout.slots)))
    name, placements = best_of(request, drafts)
    return Draft(placements=placements, algorithm=name)


class _Rounds:
    """Buckets that empty round by round."""

    def __init__(self, profiler: BucketProfiler, *, matching: bool) -> None:
        self.profiler, self.matching = profiler, matching
        self.pricer = profiler.pricer
        self.ranks = self.pricer.topology.data_ranks
        self.buckets = buckets_of(self.pricer.request.workload)
        self.configs: list[BucketConfig] = [profiler.best(b) for b in self.buckets]
        self.taken = [0] * len(self.buckets)

    def left(self) -> bool:
        return any(t < len(b) for t, b in zip(self.taken, self.buckets, strict=True))

    def remaining(self, bucket: int, cuts: Sequence[_Cut] = ()) -> int:
        held = sum(c.batch for c in cuts if c.bucket == bucket)
        return len(self.buckets[bucket]) - self.taken[bucket] - held

    def next(self) -> list[Group]:
        """The groups of one more round, whose samples leave their buckets."""
        cuts = self.enqueue()
        if self.matching:
            matched = self.grow(self.drop(self.match(cuts)))
            if self.value(matched) > self.value(cuts):
                cuts = matched
        cuts = self.widen(cuts)
        groups = []
        for cut in cuts:
            begin = self.taken[cut.bucket]
            samples = self.buckets[cut.bucket][begin : begin + cut.batch]
            self.taken[cut.bucket] += cut.batch
            tokens = sum(self.pricer.packs[i].tokens for i in samples)
            least = self.profiler.least_recompute(tokens, cut.degree)
            groups.append(Group(cut.degree, tuple(samples), least))
        return groups

    # -- the steps of a round -------------------------------------------------------------------

    def enqueue(self) -> list[_Cut]:
        """Full batches, wide first, until no further one finds ranks."""
        order = sorted(range(len(self.buckets)), key=lambda b: (-self.configs[b].degree, b))
        cuts: list[_Cut] = []
        for b in order:
            config = self.configs[b]
            while (left := self.remaining(b, cuts)) > 0:
                degrees = [c.degree for c in cuts] + [config.degree]
                if not fits_topology(self.pricer.topology, degrees):
                    break
                cuts.append(_Cut(b, config.degree, min(config.batch, left)))
        return cuts

    def match(self, cuts: list[_Cut]) -> list[_Cut]:
        """Every group nearer to the time of the fastest: a smaller batch, then a wider group."""
        full = [c for c in cuts if self.remaining(c.bucket, cuts) > 0]
        if not full:
            return cuts
        target = min(self.time_us(c) for c in full)
        out = []
        for cut in cuts:
            sizes = range(1, cut.batch + 1)
            cut = min(
                (_Cut(cut.bucket, cut.degree, b) for b in sizes),
                key=lambda c: (abs(self.time_us(c) - target), -c.batch),
            )
            wider = [d for d in self.profiler.ladder if d >= cut.degree]
            cut = min(
                (_Cut(cut.bucket, d, cut.batch) for d in wider),
                key=lambda c: (abs(self.time_us(c) - target), c.degree),
            )
            out.append(cut)
        return out

    def drop(self, cuts: list[_Cut]) -> list[_Cut]:
        """Groups without ranks go back to their buckets, narrowest first."""
        kept = sorted(cuts, key=lambda c: (-c.degree, c.bucket))
        while not fits_topology(self.pricer.topology, [c.degree for c in kept]):
            kept.pop()
        return kept

    def grow(self, cuts: list[_Cut]) -> list[_Cut]:
        """Batches as large as the time of the slowest group allows, at most the profiled batch."""
        slowest = max(self.time_us(c) for c in cuts)
        out = list(cuts)
        for k, cut in enumerate(out):
            most = min(self.configs[cut.bucket].batch, cut.batch + self.remaining(cut.bucket, out))
            for batch in range(most, cut.batch, -1):
                larger = _Cut(cut.bucket, cut.degree, batch)
                if self.time_us(larger) <= slowest:
                    out[k] = larger
                    break
        return out

    def widen(self, cuts: list[_Cut]) -> list[_Cut]:
        """Idle ranks widen the slowest group while that makes it faster."""
        out = list(cuts)
        while sum(c.degree for c in out) < self.ranks:
            k = max(range(len(out)), key=lambda k: (self.time_us(out[k]), -k))
            wider = [d for d in self.profiler.ladder if d > out[k].degree]
            if not wider:
                break
            cut = _Cut(out[k].bucket, wider[0], out[k].batch)
            grown = [*out[:k], cut, *out[k + 1 :]]
            fits = fits_topology(self.pricer.topology, [c.degree for c in grown])
            if not fits or self.time_us(cut) >= self.time_us(out[k]):
                break
            out = grown
        return out

    # -- prices ---------------------------------------------------------------------------------

    def time_us(self, cut: _Cut) -> int:
        """Predicted time of a group, its samples as long as the longest of the bucket.

        NEVER_US when it does not fit: wider groups may hold more gathered K/V than they save.
        """
        one = self.pricer.packs[self.buckets[cut.bucket][0]]
        time_us = self.profiler.batch_time_us(one, cut.batch, cut.degree)
        return NEVER_US if time_us is None else time_us

    def value(self, cuts: list[_Cut]) -> float:
        """Work of a round, in profiled rank-time of its samples, per rank-time that it takes."""
        work = 0.0
        for cut in cuts:
            config = self.configs[cut.bucket]
            work += cut.batch * config.time_us * config.degree / config.batch
        return work / (self.ranks * max(self.time_us(c) for c in cuts))
