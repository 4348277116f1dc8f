"""The lower bound against exhaustive search: never above the optimum of small instances."""

from __future__ import annotations

import itertools
import random
from functools import cache

import pytest

from megatron_dcp.cost import Pack, resolve
from megatron_dcp.plan import Topology, Workload
from megatron_dcp.planner import PlanRequest
from megatron_dcp.planner.core import lower_bound_us
from megatron_dcp.planner.pricing import Pricer


def optimum_us(request: PlanRequest) -> int:
    """Best makespan over every partition into packs, degree and order, by depth-first search.

    Async, N <= 3 in one node: blocks are any contiguous ranks; packs run in any order.
    """
    pricer, n = Pricer(request), request.topology.data_ranks
    samples = range(len(request.workload.lengths))

    @cache
    def time_us(pack: frozenset[int], degree: int) -> int | None:
        total = Pack()
        for j in pack:
            total = total + pricer.packs[j]
        price = pricer.price(total, degree)
        return None if price is None else price.time_us

    best = 1 << 62

    def place(left: frozenset[int], free: tuple[int, ...]) -> None:
        nonlocal best
        if max(free) >= best:
            return
        if not left:
            best = max(free)
            return
        # Every subset may run next: orders matter where windows overlap.
        for size in range(1, len(left) + 1):
            for pack in itertools.combinations(sorted(left), size):
                for degree in range(1, n + 1):
                    t = time_us(frozenset(pack), degree)
                    if t is None:
                        continue
                    for first in range(n - degree + 1):
                        end = max(free[first : first + degree]) + t
                        load = free[:first] + (end,) * degree + free[first + degree :]
                        place(left - set(pack), load)

    place(frozenset(samples), (0,) * n)
    return best


@pytest.mark.parametrize("seed", range(24))
def test_bound_is_never_above_the_optimum(seed: int) -> None:
    rng = random.Random(seed)
    ranks = rng.choice([2, 3])
    lengths = [rng.choice([300, 2000, 6500, 9000, 30_000]) + rng.randint(0, 99) for _ in range(4)]
    request = PlanRequest(
        workload=Workload(lengths=tuple(lengths)),
        topology=Topology(data_ranks=ranks, ranks_per_node=ranks),
        profile=resolve("a100-gpt7b"),
    )
    best, bound = optimum_us(request), lower_bound_us(request)
    assert bound <= best
    assert bound >= 0.6 * best  # far below would be no bound worth having
