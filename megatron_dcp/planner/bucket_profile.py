"""What the original DCP profiles per bucket: the (degree, batch) of best throughput.

For every degree the batch of a bucket is doubled until memory is full; the pair with the least
rank-time per sample wins. Memory is the budget of the request, the samples of a batch are taken to
be as long as the longest of the bucket. Activation recomputation is a switch for the whole model
(off where the batch fits without, else every layer) or, with `adaptive`, as few layers as memory
needs: the knapsack of the adaptive variant, in which all layers are equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_dcp.cost import Pack
from megatron_dcp.planner.packing import degree_ladder
from megatron_dcp.planner.pricing import Pricer


@dataclass(frozen=True, slots=True)
class BucketConfig:
    """How batches of one bucket run. batch: samples; time_us: one full batch, overhead included."""

    degree: int
    batch: int
    time_us: int


class BucketProfiler:
    """Times of (bucket, degree, batch) under one cost model."""

    def __init__(self, pricer: Pricer, *, adaptive: bool) -> None:
        self.pricer = pricer
        self.adaptive = adaptive
        self.ladder = degree_ladder(pricer.topology)
        self._configs: dict[int, list[BucketConfig]] = {}

    def least_recompute(self, tokens: int, degree: int) -> int:
        """Layers that a batch of so many tokens recomputes at least: the switch, or none."""
        if self.adaptive or tokens <= self.pricer.capacity(degree):
            return 0
        return self.pricer.max_recompute

    def batch_time_us(self, one: Pack, batch: int, degree: int) -> int | None:
        """Predicted time of `batch` equal samples; None when they do not fit the degree."""
        pack = scaled(one, batch)
        least = self.least_recompute(pack.tokens, degree)
        price = self.pricer.price_from(pack, degree, least)
        return None if price is None else price.time_us

    def _batches(self, length: int, degree: int, count: int) -> Iterator[int]:
        """1, 2, 4 .. and the largest that fit, without recompute and with all of it."""
        for recompute in (0, self.pricer.max_recompute):
            most = min(count, self.pricer.capacity(degree, recompute) // length)
            if most >= 1:
                yield most
            batch = 1
            while batch < most:
                yield batch
                batch *= 2

    def configs(self, bucket: Sequence[int]) -> list[BucketConfig]:
        """Every profiled pair of a bucket (samples, longest first; known by its first sample)."""
        if bucket[0] not in self._configs:
            self._configs[bucket[0]] = self._profile(bucket)
        return self._configs[bucket[0]]

    def _profile(self, bucket: Sequence[int]) -> list[BucketConfig]:
        one = self.pricer.packs[bucket[0]]
        out = []
        for degree in self.ladder:
            for batch in sorted(set(self._batches(one.tokens, degree, len(bucket)))):
                time_us = self.batch_time_us(one, batch, degree)
                if time_us is not None:
                    out.append(BucketConfig(degree, batch, time_us))
        return out

    def best(self, bucket: Sequence[int], limit_us: int | None = None) -> BucketConfig:
        """Least rank-time per sample among the pairs within the limit; else the fastest pair.

        Raises PlanError when the longest sample of the bucket fits no degree.
        """
        configs = self.configs(bucket)
        if not configs:
            raise self.pricer.cannot_fit(bucket[0], self.ladder, "on every degree")
        inside = [c for c in configs if limit_us is None or c.time_us <= limit_us]
        if not inside:
            return min(configs, key=lambda c: (c.time_us, c.degree, -c.batch))
        return min(inside, key=lambda c: (c.time_us * c.degree / c.batch, c.degree, -c.batch))


def scaled(pack: Pack, count: int) -> Pack:
    """Sums of `count` equal samples."""
    return Pack(
        pack.tokens * count,
        pack.pairs * count,
        pack.half * count,
        pack.pairs2 * count,
        pack.half2 * count,
    )
