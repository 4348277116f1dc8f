"""Random planning requests for fuzzing: small clusters, adversarial lengths, tight budgets.

Seeded by an integer alone, so that a failing case is named by its number.
"""

from __future__ import annotations

import random

from megatron_dcp.cost import CostProfile, Link, ModelShape, resolve
from megatron_dcp.cost.profile import Overhead, Overlap
from megatron_dcp.plan import Topology, Workload
from megatron_dcp.planner import PlanRequest

GB = 10**9


def random_profile(rng: random.Random) -> CostProfile:
    """A preset, or coefficients drawn from a few values of each field."""
    if rng.random() < 0.4:
        return resolve(rng.choice(["a100-gpt7b", "a100-gpt13b", "a100-gpt30b"]))
    pick = rng.choice
    return CostProfile(
        name="random",
        model=ModelShape(
            layers=pick([1, 4, 32]), heads=32, kv_heads=pick([1, 2, 4, 8, 32]), head_dim=128,
            hidden=4096, vocab=1000, element_bytes=2,
        ),
        pairs=pick(["causal", "full"]),
        linear_us_per_token=pick([0.0, 1.0, 180.0]),
        attn_us_per_pair=pick([0.0, 0.001, 0.005]),
        linear_half_tokens=pick([0, 256]),
        attn_half_tokens=pick([0, 512]),
        overhead_us=Overhead(async_=pick([0.0, 300.5, 20000.0]), lockstep=pick([0.0, 629000.0])),
        links=(
            Link(max_degree=8, us_per_byte=pick([0, 1e-5]), latency_us=pick([0, 10.0])),
            Link(max_degree=64, us_per_byte=1e-4, latency_us=20.0),
        ),
        overlap=Overlap(ring=pick([0, 0.9]), ulysses=pick([0, 0.3])),
        static_bytes=pick([0, 16 * GB]),
        kept_bytes_per_token_layer=pick([140000, 1.5e5]),
        checkpoint_bytes_per_token_layer=8192,
        working_bytes_per_token=65536,
        head_bytes_per_token=pick([0, 500000]),
        budget_bytes=pick([20, 40, 80]) * GB,
    )  # fmt: skip


def random_lengths(rng: random.Random, ranks: int, most: int) -> list[int]:
    """Log-normal, all equal, one giant, or powers of two and their neighbours."""
    count = rng.choice([1, 2, ranks, rng.randint(1, most), rng.randint(1, min(most, 24))])
    count = min(count, most)
    kind = rng.random()
    if kind < 0.15:
        return [rng.choice([1, 2, 1000, 6400, 6401])] * count
    if kind < 0.3:
        return [max(1, 2 ** rng.randint(0, 16) + rng.randint(-1, 1)) for _ in range(count)]
    lengths = [int(min(400_000, max(1, rng.lognormvariate(6.5, 1.6)))) for _ in range(count)]
    if kind > 0.85:
        lengths[0] = rng.choice([100_000, 400_000, 51_200 * ranks, 51_200 * ranks - 1])
    return lengths


def random_request(seed: int, *, most_ranks: int = 64, most_samples: int = 300) -> PlanRequest:
    """The request of this number; about 3 in 100 hold a sample that fits nowhere."""
    rng = random.Random(seed)
    per_node = rng.choice([1, 2, 3, 4, 6, 8])
    nodes = rng.choice([n for n in (1, 1, 2, 3, 4, 8) if n * per_node <= most_ranks] or [1])
    ranks = per_node * nodes
    profile = random_profile(rng)
    stages = rng.choice([1, 1, 1, 2])
    if profile.model.layers % stages:
        stages = 1
    virtual = rng.choice([1, 2]) if stages > 1 else 1
    speed = None
    if rng.random() < 0.15:
        speed = tuple(rng.randint(930, 1000) for _ in range(ranks))
    domains = [d for d in range(1, ranks + 1) if ranks % d == 0]
    budget = int(profile.budget_bytes * rng.choice([1, 1, 1, 0.5, 0.85]))
    return PlanRequest(
        workload=Workload(lengths=tuple(random_lengths(rng, ranks, most_samples))),
        topology=Topology(
            data_ranks=ranks,
            ranks_per_node=per_node,
            pipeline_stages=stages,
            virtual_stages=virtual,
            speed=speed,
        ),
        profile=profile,
        lockstep=rng.choice([1, 1, 1, ranks, rng.choice(domains)]),
        budget_bytes=budget,
        recompute=rng.random() < 0.85,
    )
