"""`packed`, `static`: pinned makespans, degree rules, memory, errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dcp.cost import resolve
from megatron_dcp.errors import ConfigError, PlanError
from megatron_dcp.plan import StepPlan, Topology, Workload
from megatron_dcp.planner import PlanRequest
from megatron_dcp.planner.baselines.kk import karmarkar_karp
from megatron_dcp.planner.packing import FirstFit, balanced_packs, blocks_of, degree_ladder, lpt
from megatron_dcp.planner.pricing import Pricer
from megatron_dcp.planner.registry import build_plan, find_strategy

LENGTHS = Path(__file__).parents[2] / "data" / "lengths"


def request(lengths: list[int], ranks: int, per_node: int = 8, **options: object) -> PlanRequest:
    return PlanRequest(
        workload=Workload(lengths=tuple(lengths)),
        topology=Topology(data_ranks=ranks, ranks_per_node=min(ranks, per_node)),
        profile=resolve("a100-gpt7b"),
        **options,  # type: ignore[arg-type]
    )


def run(asked: PlanRequest, spec: str) -> StepPlan:
    function, parameter = find_strategy(spec)
    return build_plan(asked, spec, function, lambda _: 1, parameter)


def file_case(name: str, n: int) -> list[int]:
    return [int(x) for x in (LENGTHS / f"{name}_{n}.txt").read_text().split()]


@pytest.mark.parametrize(
    ("name", "n", "ranks", "expected_ms"),
    [
        ("wiki", 512, 64, 1703),
        ("prolong", 512, 64, 5631),
        ("heavy", 512, 64, 43602),
        ("prolong", 2048, 256, 10041),
    ],
)
def test_static_gives_the_pinned_column(name: str, n: int, ranks: int, expected_ms: int) -> None:
    plan = run(request(file_case(name, n), ranks), "static")
    assert plan.makespan_us / 1000 == pytest.approx(expected_ms, rel=0.001)


def test_static_is_the_best_of_its_degrees() -> None:
    lengths = file_case("wiki", 512)
    spans = {d: run(request(lengths, 64), f"static:{d}").makespan_us for d in (1, 2, 4, 8, 16)}
    assert run(request(lengths, 64), "static").makespan_us == min(spans.values())


def test_static_in_lockstep_fills_slots() -> None:
    plan = run(request(file_case("wiki", 512), 64, lockstep=64), "static")
    degree = plan.placements[0].degree
    used = [sum(p.slot == s for p in plan.placements) for s in range(plan.slots)]
    assert all(count == 64 // degree for count in used[:-1])
    by_time = [max(p.time_us for p in plan.placements if p.slot == s) for s in range(plan.slots)]
    assert plan.makespan_us == sum(by_time)


def held_samples(plan: StepPlan) -> dict[int, list[tuple[int, ...]]]:
    return {r: [p.samples for p in plan.of_rank(r)] for r in range(plan.topology.data_ranks)}


def test_packed_by_hand() -> None:
    """Cap 6400 tokens on two ranks."""
    # First fit: {6000}, {4000, 2000}: two full packs, one per rank.
    plan = run(request([4000, 6000, 2000], 2), "packed:1")
    assert held_samples(plan) == {0: [(1,)], 1: [(0, 2)]}
    assert all(p.recompute == 0 and p.scheme == "local" for p in plan.placements)
    assert plan.makespan_us == max(p.time_us for p in plan.placements)
    # First fit: {5000}, {4000, 2000}, {3000}: three packs do not divide, four even ones do.
    plan = run(request([4000, 5000, 3000, 2000], 2), "packed:1")
    assert held_samples(plan) == {0: [(1,), (3,)], 1: [(0,), (2,)]}


def test_bucket_by_hand() -> None:
    """Octaves (2048, 4096] and (512, 1024]: no batch mixes them; at most 6400 tokens a batch."""
    plan = run(request([4000, 1000, 3000, 900, 800], 1), "bucket:1")
    assert sorted(p.samples for p in plan.placements) == [(0,), (1, 3, 4), (2,)]
    assert run(request([4000, 60_000], 8), "bucket").placements[0].degree == 8
    assert run(request([4000, 9000], 8), "bucket:longest").placements[0].degree == 2


def test_karmarkar_karp_by_hand() -> None:
    """The textbook example 8, 7, 6, 5, 4 differences to {8, 6}, {7, 5, 4}: sums 14 and 16."""
    parts = karmarkar_karp([8, 7, 6, 5, 4], 2)
    assert sorted(map(sorted, parts)) == [[0, 2], [1, 3, 4]]
    # Three sets of 1..6: 6+1, 5+2, 4+3 (all 7).
    parts = karmarkar_karp([1, 2, 3, 4, 5, 6], 3)
    assert [sum(i + 1 for i in p) for p in parts] == [7, 7, 7]
    assert karmarkar_karp([3], 2) == [[0], []]


def test_karmarkar_karp_partitions() -> None:
    weights = [(i * 7919) % 1000 + 1 for i in range(200)]
    for parts in (1, 3, 8, 300):
        sets = karmarkar_karp(weights, parts)
        assert len(sets) == parts
        assert sorted(i for s in sets for i in s) == list(range(200))
    sums = [sum(weights[i] for i in s) for s in karmarkar_karp(weights, 8)]
    assert max(sums) - min(sums) <= 2  # LPT leaves more; differencing is that good here


def test_wlb_by_hand() -> None:
    """Work, not tokens, is balanced: three short ones weigh less than the long one."""
    plan = run(request([6000, 2000, 2000, 2000], 2), "wlb:1")
    assert held_samples(plan)[0] == [(0,)]
    assert held_samples(plan)[1] == [(1, 2, 3)]
    # Cap 6400: the least work has no room for 1500, the fewest tokens have.
    packs = balanced_packs([6000, 3000, 2900, 1500], [9, 20, 19, 1], range(4), 2, 8000)
    assert packs == [[0, 3], [1, 2]]
    assert balanced_packs([6000, 6000, 6000], [1, 1, 1], range(3), 2, 8000) is None


@pytest.mark.parametrize(
    ("longest", "degree"), [(6400, 1), (6401, 2), (12_801, 4), (51_200, 8), (60_000, 8)]
)
def test_bare_packed_takes_the_degree_of_the_longest(longest: int, degree: int) -> None:
    plan = run(request([100, longest, 200], 8), "packed")
    assert {p.degree for p in plan.placements} == {degree}
    needs_recompute = longest > 6400 * degree
    assert any(p.recompute > 0 for p in plan.placements) == needs_recompute


def test_a_long_sample_is_alone_with_the_least_recompute() -> None:
    plan = run(request([10_000, 100, 100], 1), "packed:1")
    (alone,) = [p for p in plan.placements if 0 in p.samples]
    assert alone.samples == (0,)
    # bytes per layer fall from 1 to 1/8: (32 - r * 7/8) / 32 * 10000 <= 6400 first at r = 14
    assert alone.recompute == 14
    assert alone.bytes <= plan.budget_bytes


def test_lockstep_slots_share_one_recompute_value() -> None:
    plan = run(request([10_000, 6000, 6000, 6000], 2, lockstep=2), "packed:1")
    for slot in range(plan.slots):
        assert len({p.recompute for p in plan.placements if p.slot == slot}) == 1
    assert {p.recompute for p in plan.placements} == {0, 14}


@pytest.mark.parametrize("spec", ["packed", "packed:1", "static", "static:2"])
def test_a_sample_that_cannot_fit_is_named(spec: str) -> None:
    with pytest.raises(PlanError, match=r"sample 1 of length 900000 .* bytes .* budget") as caught:
        run(request([10, 900_000], 4), spec)
    assert caught.value.witness == 1


def test_recompute_can_be_forbidden() -> None:
    with pytest.raises(PlanError, match="recomputation forbidden"):
        run(request([10_000], 1, recompute=False), "static")
    assert run(request([10_000], 2, recompute=False), "static").placements[0].degree == 2


@pytest.mark.parametrize("spec", ["packed:0", "packed:x", "static:12", "static:-1", "packed:128"])
def test_a_degree_that_the_topology_has_not_is_bad_usage(spec: str) -> None:
    with pytest.raises(ConfigError, match=r"degree|blocks"):
        run(request([10], 16), spec)


def test_ladder_and_blocks() -> None:
    def topology(ranks: int, per_node: int) -> Topology:
        return Topology(data_ranks=ranks, ranks_per_node=per_node)

    assert degree_ladder(topology(64, 8)) == [1, 2, 4, 8, 16, 32, 64]
    assert degree_ladder(topology(24, 8)) == [1, 2, 4, 8, 16, 24]
    assert degree_ladder(topology(12, 6)) == [1, 2, 4, 6, 12]
    assert blocks_of(topology(12, 6), 4) == [0, 6]
    assert blocks_of(topology(12, 6), 3) == [0, 3, 6, 9]
    assert blocks_of(topology(24, 8), 16) == [0]
    for ranks, per_node in ((64, 8), (24, 8), (12, 6), (5, 5)):
        t = topology(ranks, per_node)
        for degree in degree_ladder(t):
            assert t.legal_degree(degree)
            assert all(t.block_fits(b, degree) for b in blocks_of(t, degree))


def test_lpt_follows_speed() -> None:
    assert lpt([5, 4, 3, 3], [1000, 1000]) == [[0, 3], [1, 2]]
    assert lpt([4, 4, 4], [2000, 1000]) == [[0, 1], [2]]


def test_first_fit_is_first_fit() -> None:
    fit = FirstFit(10)
    for item, size in enumerate([6, 7, 3, 4, 12, 1, 3]):
        fit.add(item, size)
    assert fit.bins == [[0, 2, 5], [1, 6], [3], [4]]


def test_pricing_takes_the_fastest_scheme_and_the_least_recompute() -> None:
    """Against trying every (scheme, recompute) of a profile with head limits and gathered KV."""
    from dataclasses import replace

    from megatron_dcp.cost import Link, ModelShape

    profile = replace(
        resolve("a100-gpt7b"),
        name="grouped",
        pairs="causal",
        model=ModelShape(
            layers=8, heads=12, kv_heads=4, head_dim=64, hidden=768, vocab=1000, element_bytes=2
        ),
        comm_bytes_per_token_layer=None,
        links=(Link(max_degree=4, us_per_byte=1e-4, latency_us=3.0),
               Link(max_degree=64, us_per_byte=1e-3, latency_us=20.0)),
        kept_bytes_per_token_layer=60_000,
        checkpoint_bytes_per_token_layer=3_000,
        budget_bytes=1_000_000_000,
    )  # fmt: skip
    asked = PlanRequest(
        workload=Workload(lengths=(1000, 4000, 9000, 30_000)),
        topology=Topology(data_ranks=8, ranks_per_node=4),
        profile=profile,
    )
    pricer, cost = Pricer(asked), asked.cost
    for pack in pricer.packs:
        for degree in asked.topology.degrees():
            fitting = []
            for i, mode in enumerate(cost.modes(degree)):
                least = next(
                    (r for r in range(9) if cost.bytes(pack, degree, mode, r) <= 1_000_000_000),
                    None,
                )
                if least is not None:
                    fitting.append((cost.time_us(pack, degree, mode, least), i, mode, least))
            price = pricer.price(pack, degree)
            if not fitting:
                assert price is None
                continue
            time_us, _, mode, least = min(fitting, key=lambda x: x[:2])
            assert price is not None
            assert (price.time_us, price.mode, price.recompute) == (time_us, mode, least)
            assert price.bytes == cost.bytes(pack, degree, mode, least)
