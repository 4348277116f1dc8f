"""Totals of one strategy over many replayed steps, and the comparison of several.

Plans come from outside (the simulator never plans). Shares are fractions of rank-time weighted by
step time. Speedups are ratios of summed step times over the steps that both strategies planned, so
that a strategy that fails on some steps is never compared on easier ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_dcp.plan import StepPlan
from megatron_dcp.plan.groups import communicators
from megatron_dcp.sim.replay import Replay

SCHEMA = "mdcp.simulate/1"
BASELINES = ("bucket", "packed", "static")
SHARES = ("compute", "recompute", "comm_inside", "comm_across", "gathers", "overhead", "idle")
StepKey = tuple[int, int]  # (seed, step)


def padded_tokens(plan: StepPlan) -> int:
    """Tokens that ranks compute beyond the real ones: shards of a placement are equal, and a
    strategy that pads to bucket shapes says so in `info["padding_tokens"]`."""
    padding = int(plan.info.get("padding_tokens", 0))
    for p in plan.placements:
        padding += -plan.tokens_of(p) % p.degree
    return padding


@dataclass(slots=True, kw_only=True)
class Tally:
    """Running totals of one strategy. Times in us, sums in rank-us."""

    name: str
    step_us: dict[StepKey, float] = field(default_factory=dict)
    rank_us: float = 0.0
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SHARES, 0.0))
    reduction: float = 0.0
    tokens: int = 0
    padding: int = 0
    ranks: int = 1
    planner_us: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    prediction_error: float = 0.0  # largest |replay / plan - 1|
    shapes: set[tuple[int, int, int]] = field(default_factory=set)
    groups: set[tuple[int, ...]] = field(default_factory=set)
    failed: str | None = None

    def add(self, key: StepKey, plan: StepPlan, outcome: Replay, padding: int = 0) -> None:
        """Count one replayed step of a seed. padding: tokens of the plan's lengths that are none of
        a sample's."""
        self.step_us[key] = outcome.step_us
        self.rank_us += outcome.step_us * outcome.lanes
        for name in SHARES:
            self.sums[name] += getattr(outcome, name)
        self.reduction += outcome.reduction_us * outcome.lanes
        self.tokens += plan.workload.tokens - padding
        self.padding += padded_tokens(plan) + padding
        self.ranks = outcome.lanes
        if "planner_us" in plan.info:
            self.planner_us.append(float(plan.info["planner_us"]))
        self.gaps.append(plan.gap)
        if plan.makespan_us:
            error = abs(outcome.makespan_us / plan.makespan_us - 1.0)
            self.prediction_error = max(self.prediction_error, error)
        self.groups |= communicators(plan)
        self.shapes |= {
            (-(-plan.tokens_of(p) // p.degree), p.degree, p.recompute) for p in plan.placements
        }

    def share(self, *names: str) -> float:
        total = sum(self.reduction if n == "reduction" else self.sums[n] for n in names)
        return total / self.rank_us if self.rank_us else 0.0

    @property
    def step_ms(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.array([self.step_us[k] for k in sorted(self.step_us)]) / 1e3

    @property
    def tokens_per_s_per_rank(self) -> float:
        return self.tokens * 1e6 / self.rank_us if self.rank_us else 0.0

    @property
    def seed_std_ms(self) -> float:
        """Standard deviation over seeds of the seed's mean step."""
        by_seed: dict[int, list[float]] = {}
        for (seed, _), us in self.step_us.items():
            by_seed.setdefault(seed, []).append(us / 1e3)
        return float(np.std([np.mean(v) for v in by_seed.values()])) if by_seed else 0.0


def speedup(ours: Tally, theirs: Tally | None) -> float | None:
    """How many times faster `ours` is than `theirs`, on the steps that both have."""
    if theirs is None:
        return None
    common = ours.step_us.keys() & theirs.step_us.keys()
    mine = sum(ours.step_us[k] for k in common)
    return sum(theirs.step_us[k] for k in common) / mine if mine else None


def speedup_by_seed(ours: Tally, theirs: Tally) -> list[float]:
    """The speedup of each seed that both have, in order of seeds."""
    common = sorted(ours.step_us.keys() & theirs.step_us.keys())
    out = []
    for seed in sorted({s for s, _ in common}):
        keys = [k for k in common if k[0] == seed]
        out.append(sum(theirs.step_us[k] for k in keys) / sum(ours.step_us[k] for k in keys))
    return out


def to_object(tallies: Mapping[str, Tally], ranks: int) -> dict[str, Any]:
    """`mdcp.simulate/1`: the stable part under `strategies`, more under `details`; strategies that
    planned no step stand under `failed` with the reason."""
    done = {n: t for n, t in tallies.items() if t.step_us}
    strategies, details = {}, {}
    for name, t in done.items():
        strategies[name] = {
            "step_ms": {"mean": float(t.step_ms.mean()), "std": float(t.step_ms.std())},
            "speedup_vs": {b: speedup(t, done.get(b)) for b in BASELINES},
            "idle": t.share("idle"),
            "comm": t.share("comm_inside", "comm_across", "gathers", "reduction"),
            "recompute": t.share("recompute"),
            "padding": t.padding / (t.tokens + t.padding),
            "planner_ms": float(np.mean(t.planner_us)) / 1e3 if t.planner_us else 0.0,
        }
        details[name] = {
            "steps": len(t.step_us),
            "seed_std_ms": t.seed_std_ms,
            "tokens_per_s_per_rank": t.tokens_per_s_per_rank,
            "shapes": len(t.shapes),
            "communicators": len(t.groups),
            "gap": float(np.mean(t.gaps)),
            "prediction_error": t.prediction_error,
            **{f"share_{n}": t.share(n) for n in (*SHARES, "reduction")},
        }
    failed = {n: t.failed for n, t in tallies.items() if t.failed}
    return {
        "schema": SCHEMA,
        "ranks": ranks,
        "strategies": strategies,
        "details": details,
        "failed": failed,
    }
