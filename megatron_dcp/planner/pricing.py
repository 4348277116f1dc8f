"""Prices of packs and blocks, shared by every strategy that is written in Python.

Pricing rule: a pack on a degree runs with the fastest scheme of `CostModel.modes`, each at the
least number of recomputed layers that fits the budget; ties go to the earlier scheme. All numbers
are integer microseconds and bytes, so results are equal on every machine.

Lockstep over all ranks has one recompute value per slot: `place_slots` raises every placement of a
slot to the largest of their least values and prices them again there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_dcp.cost import Mode, Pack, workload_packs
from megatron_dcp.errors import PlanError
from megatron_dcp.plan import CostRef, Placement, StepPlan
from megatron_dcp.plan.replay import makespan_us
from megatron_dcp.plan.types import NOMINAL_SPEED
from megatron_dcp.planner.registry import PlanRequest


@dataclass(frozen=True, slots=True)
class Price:
    """One pack on one degree: how it runs, how long on a block of nominal speed, bytes per rank."""

    mode: Mode
    recompute: int
    time_us: int
    bytes: int


class Pricer:
    """Prices packs of one request; keeps what it has computed for the life of one plan."""

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self.cost = request.cost
        self.topology = request.topology
        self.layers = self.cost.layers
        self.overhead_us = math.floor(self.cost.overhead_us + 0.5)
        self.max_recompute = self.layers if request.recompute else 0
        self.packs: list[Pack] = workload_packs(request.profile, request.workload)
        self._modes: dict[int, list[Mode]] = {}
        self._capacity: dict[tuple[int, int], list[int]] = {}
        self._prices: dict[tuple[Pack, int], Price | None] = {}

    # -- memory ---------------------------------------------------------------------------------

    def modes(self, degree: int) -> list[Mode]:
        """Schemes of a degree, in the order of ties."""
        if degree not in self._modes:
            self._modes[degree] = self.cost.modes(degree)
        return self._modes[degree]

    def _fits(self, tokens: int, degree: int, mode: Mode, recompute: int) -> bool:
        needed = self.cost.bytes(Pack(tokens), degree, mode, recompute)
        return needed <= self.request.budget_bytes

    def _most_tokens(self, degree: int, mode: Mode, recompute: int) -> int:
        """By bisection: bytes grow with tokens."""
        low, high = 0, self.request.workload.tokens + 1  # low fits, high does not or is not needed
        while high - low > 1:
            middle = (low + high) // 2
            if self._fits(middle, degree, mode, recompute):
                low = middle
            else:
                high = middle
        return low

    def _mode_capacities(self, degree: int, recompute: int) -> list[int]:
        """Most tokens of one placement for each scheme of a degree (0: not even one fits)."""
        key = (degree, recompute)
        if key not in self._capacity:
            self._capacity[key] = [
                self._most_tokens(degree, mode, recompute) for mode in self.modes(degree)
            ]
        return self._capacity[key]

    def capacity(self, degree: int, recompute: int = 0) -> int:
        """Most tokens that one placement of a degree may hold, at most the global batch's."""
        return max(self._mode_capacities(degree, recompute))

    # -- time -----------------------------------------------------------------------------------

    def price(self, pack: Pack, degree: int) -> Price | None:
        """The pricing rule of this module; None when the pack does not fit this degree at all."""
        key = (pack, degree)
        if key not in self._prices:
            self._prices[key] = self._price(pack, degree)
        return self._prices[key]

    def _price(self, pack: Pack, degree: int) -> Price | None:
        best: Price | None = None
        for i, mode in enumerate(self.modes(degree)):
            recompute = self._least_recompute(pack.tokens, degree, i)
            if recompute is None:
                continue
            time_us = self.cost.time_us(pack, degree, mode, recompute)
            if best is None or time_us < best.time_us:
                needed = self.cost.bytes(pack, degree, mode, recompute)
                best = Price(mode, recompute, time_us, needed)
        return best

    def _least_recompute(self, tokens: int, degree: int, mode_index: int) -> int | None:
        if tokens <= self._mode_capacities(degree, 0)[mode_index]:
            return 0
        if tokens > self._mode_capacities(degree, self.max_recompute)[mode_index]:
            return None
        mode = self.modes(degree)[mode_index]
        low, high = 0, self.max_recompute  # low does not fit, high does
        while high - low > 1:
            middle = (low + high) // 2
            if self._fits(tokens, degree, mode, middle):
                high = middle
            else:
                low = middle
        return high

    def price_at(self, pack: Pack, degree: int, recompute: int) -> Price | None:
        """The fastest scheme that fits with exactly this many recomputed layers."""
        best: Price | None = None
        for mode, capacity in zip(
            self.modes(degree), self._mode_capacities(degree, recompute), strict=True
        ):
            if pack.tokens > capacity:
                continue
            time_us = self.cost.time_us(pack, degree, mode, recompute)
            if best is None or time_us < best.time_us:
                needed = self.cost.bytes(pack, degree, mode, recompute)
                best = Price(mode, recompute, time_us, needed)
        return best

    def price_from(self, pack: Pack, degree: int, recompute: int) -> Price | None:
        """The pricing rule, but with at least this many recomputed layers."""
        price = self.price(pack, degree)
        if price is None or price.recompute >= recompute:
            return price
        return self.price_at(pack, degree, recompute)

    def share_time_us(self, samples: Iterable[int], degree: int, least_recompute: int = 0) -> int:
        """Predicted time of samples that run together; 0 when they do not fit the degree."""
        price = self.price_from(self.pack_of(samples), degree, least_recompute)
        return 0 if price is None else price.time_us

    def on_block(self, pack: Pack, price: Price, first_rank: int, degree: int) -> int:
        """Time of a priced pack on a block: its slowest rank sets the pace."""
        speed = self.topology.block_speed(first_rank, degree)
        if speed == NOMINAL_SPEED:
            return price.time_us
        return self.cost.time_us(pack, degree, price.mode, price.recompute, speed)

    # -- samples --------------------------------------------------------------------------------

    def pack_of(self, samples: Iterable[int]) -> Pack:
        """Sums over some samples."""
        tokens = pairs = half = pairs2 = half2 = 0
        for i in samples:  # plain integers: a Pack per step would be most of a plan's time
            one = self.packs[i]
            tokens += one.tokens
            pairs += one.pairs
            half += one.half
            pairs2 += one.pairs2
            half2 += one.half2
        return Pack(tokens, pairs, half, pairs2, half2)

    def sample_price(self, sample: int, degree: int) -> Price | None:
        """One sample alone on a degree."""
        return self.price(self.packs[sample], degree)

    def longest(self) -> int:
        """The id of the longest sample (the first of equals)."""
        lengths = self.request.workload.lengths
        return max(range(len(lengths)), key=lambda i: (lengths[i], -i))

    def cannot_fit(self, sample: int, degrees: Sequence[int], what: str) -> PlanError:
        """The error of a sample for which no allowed degree has room, even fully recomputed."""
        length = self.request.workload.lengths[sample]
        needed, degree = min(
            (self.cost.bytes(self.packs[sample], d, m, r), d)
            for d in degrees
            for m in self.modes(d)
            for r in (0, self.max_recompute)
        )
        how = "every layer recomputed" if self.max_recompute else "recomputation forbidden"
        return PlanError(
            f"sample {sample} of length {length} does not fit: {what} it needs at least {needed} "
            f"bytes per rank (degree {degree}, {how}), the budget is "
            f"{self.request.budget_bytes}; use more ranks or memory, another strategy, "
            "or oversize=drop|truncate",
            invariant="fits_memory",
            witness=sample,
        )


@dataclass(frozen=True, slots=True)
class Share:
    """Samples that run together on one block: a placement that has no slot and no price yet.

    least_recompute: at least this many layers are recomputed, even where fewer would fit.
    """

    first_rank: int
    degree: int
    samples: tuple[int, ...]
    least_recompute: int = 0


def place_slots(pricer: Pricer, slots: Sequence[Sequence[Share]]) -> list[Placement]:
    """Price the shares of each slot; blocks of one slot are disjoint, empty slots are skipped.

    Raises PlanError when a share does not fit its degree (a strategy must not build such a share,
    except for a sample that fits nowhere).
    """
    request = pricer.request
    n = request.topology.data_ranks
    uniform = request.lockstep == n and n > 1
    out: list[Placement] = []
    for number, shares in enumerate([s for s in slots if s]):
        packs = [pricer.pack_of(s.samples) for s in shares]
        prices = [
            _required(pricer, s, pricer.price_from(k, s.degree, s.least_recompute))
            for s, k in zip(shares, packs, strict=True)
        ]
        if uniform:
            recompute = max(p.recompute for p in prices)
            prices = [
                _required(pricer, s, pricer.price_at(k, s.degree, recompute))
                for s, k in zip(shares, packs, strict=True)
            ]
        for share, pack, price in zip(shares, packs, prices, strict=True):
            out.append(
                Placement(
                    slot=number,
                    first_rank=share.first_rank,
                    degree=share.degree,
                    samples=share.samples,
                    scheme=price.mode.scheme,
                    inner_degree=price.mode.inner_degree,
                    recompute=price.recompute,
                    time_us=pricer.on_block(pack, price, share.first_rank, share.degree),
                    bytes=price.bytes,
                )
            )
    return out


def _required(pricer: Pricer, share: Share, price: Price | None) -> Price:
    if price is None:
        longest = max(share.samples, key=lambda i: pricer.request.workload.lengths[i])
        raise pricer.cannot_fit(longest, [share.degree], f"on {share.degree} ranks")
    return price


def replayed_us(
    request: PlanRequest, placements: Sequence[Placement], *, dummies: bool = True
) -> int:
    """Makespan of some placements under this request. With pipeline stages and `dummies`, also what
    the runtime fills ranks up with: what strategies compare, and a plan's makespan leaves out."""
    plan = StepPlan(
        strategy="",
        algorithm="",
        topology=request.topology,
        lockstep=request.lockstep,
        cost=CostRef(name="", digest=""),
        budget_bytes=request.budget_bytes,
        layers=request.cost.layers,
        workload=request.workload,
        placements=tuple(placements),
        makespan_us=0,
        lower_bound_us=0,
    )
    return makespan_us(plan, request.cost.dummy_us if dummies else 0)
