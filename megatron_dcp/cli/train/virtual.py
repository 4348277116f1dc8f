"""Virtual ranks: plans of 8, 32 or more ranks replayed with measured compute.

Every placement of the plan is run on one device with its real shapes (`runtime.virtual`); links are
those of a model, inside a node and across nodes. The processes of the run share the placements out,
one device each, and exchange the times.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_dcp.cli.train.interleave import slug
from megatron_dcp.cli.train.model import Gpt, loss_sum
from megatron_dcp.cli.train.options import SCALE_RATIO
from megatron_dcp.cli.train.scale import paced_us_per_byte
from megatron_dcp.cost import CostModel, CostProfile, Link
from megatron_dcp.data.stdlib import TextCorpus
from megatron_dcp.dist import DataWorld, PlacementContext, gather_bytes, use_placement
from megatron_dcp.errors import MdcpError
from megatron_dcp.observe.run_dir import clear_run, write_plan
from megatron_dcp.observe.summary import RunSummary, StepRecord
from megatron_dcp.observe.timeline import draw_step
from megatron_dcp.plan import StepPlan, Topology, Workload
from megatron_dcp.planner import PlanRequest, make_plan
from megatron_dcp.runtime.contender import plan_on_rank_0, timed_by_clock
from megatron_dcp.runtime.virtual import Run, measured_step, time_placements
from megatron_dcp.sim import replay


def run_pack(model: Gpt, context: PlacementContext) -> None:
    """Forward and backward of one rank's share of a placement, on random tokens."""
    ids = torch.randint(0, model.config.vocab, (context.rows,), device=context.world.device)
    with use_placement(context):
        torch.autograd.backward(loss_sum(model(ids, context.position_ids), ids))
    model.zero_grad(set_to_none=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What is replayed: ranks in nodes, samples of a global batch, repeats with other batches."""

    ranks: int
    ranks_per_node: int
    samples: int
    repeats: int
    seed: int

    @property
    def topology(self) -> Topology:
        return Topology(data_ranks=self.ranks, ranks_per_node=self.ranks_per_node)


def scale_links(profile: CostProfile, cluster: Cluster) -> tuple[Link, ...]:
    """Links that make this profile's model feel like a 7B one inside a node and across nodes."""
    node = paced_us_per_byte(profile, SCALE_RATIO["7b-node"])
    cross = paced_us_per_byte(profile, SCALE_RATIO["7b-cross-node"])
    most = max(cluster.ranks, cluster.ranks_per_node + 1)
    return (
        Link(max_degree=cluster.ranks_per_node, us_per_byte=node, latency_us=0.0),
        Link(max_degree=most, us_per_byte=cross, latency_us=0.0),
    )


def virtual_run(
    cluster: Cluster,
    *,
    strategies: Sequence[str],
    corpus: TextCorpus,
    run: Run,
    profile: CostProfile,
    out: Path,
    say: Any,
    device: torch.device | str = "cpu",
    title: str = "",
    draw: Sequence[str] | None = None,
) -> RunSummary:
    """Replay one global batch per repeat under every strategy; rank 0 writes into `out`.

    run: one rank's forward and backward of a placement. profile: with the links of the cluster.
    title: in front of the table's heading. draw: whose first step is drawn; None: everybody's.
    """
    world = DataWorld()
    if world.rank == 0:
        clear_run(out, ranks=0)
    profile = replace(profile, name=f"{profile.name}-virtual{cluster.ranks}")
    summary = RunSummary(
        what=f"{title}{cluster.ranks} virtual ranks, {cluster.ranks_per_node} per node: "
        "measured compute, modelled links",
        config={"ranks": cluster.ranks, "ranks_per_node": cluster.ranks_per_node,
                "global_batch": cluster.samples, "corpus": corpus.name,
                "budget_bytes": profile.budget_bytes},
    )  # fmt: skip
    lengths = np.asarray(corpus.lengths)
    for repeat in range(cluster.repeats):
        rng = np.random.default_rng([cluster.seed, repeat])
        chosen = rng.choice(lengths, cluster.samples, replace=False)
        workload = Workload(lengths=tuple(int(n) for n in chosen))
        request = PlanRequest(
            workload=workload, topology=cluster.topology, profile=profile, step=repeat
        )
        for strategy in strategies:
            if strategy in summary.failed:
                continue
            try:
                plan = _plan(world, strategy, request)
            except MdcpError as error:
                summary.failed[strategy] = str(error)
                say(f"{strategy}: {error}")
                continue
            record, timed = _replayed(world, plan, profile, run, repeat, device)
            summary.add(strategy, record)
            if world.rank == 0:
                write_plan(out, plan)
                if repeat == 0 and (draw is None or strategy in draw):
                    label = f"{strategy}, {cluster.ranks} virtual ranks, measured compute"
                    draw_step(timed, [], out / f"timeline-{slug(strategy)}.png", label)
            say(f"virtual {cluster.ranks} ranks, repeat {repeat + 1}/{cluster.repeats}: {strategy}")
    if world.rank == 0:
        summary.write(out)
    world.close()
    return summary


def _plan(world: DataWorld, strategy: str, request: PlanRequest) -> StepPlan:
    if timed_by_clock(strategy):
        return plan_on_rank_0(world, strategy, request)
    return make_plan(request, strategy)


def _replayed(
    world: DataWorld,
    plan: StepPlan,
    profile: CostProfile,
    run: Run,
    repeat: int,
    device: torch.device | str,
) -> tuple[StepRecord, StepPlan]:
    """The record of a step, and the plan with its measured times."""
    mine = [i for i in range(len(plan.placements)) if i % world.size == world.rank]
    timed = time_placements(plan, mine, run, device=device)
    told = json.dumps({i: (m.us, m.peak_bytes) for i, m in timed.items()})
    shares = [json.loads(b) for b in gather_bytes(world, told.encode())]
    measured = {int(i): m for share in shares for i, m in share.items()}
    cost = CostModel(profile, plan.topology)
    step = measured_step(plan, cost, {i: us for i, (us, _) in measured.items()})
    predicted = replay(plan, profile)
    planner_ms = plan.info["planner_us"] / 1e3
    record = StepRecord(
        repeat=repeat,
        tokens=plan.workload.tokens,
        step_s=step.plan.makespan_us / 1e6,
        predicted_s=predicted.makespan_us / 1e6,
        idle=step.plan.info["idle"],
        comm=step.comm,
        recompute=predicted.share("recompute"),
        planner_ms=planner_ms,
        exposed_ms=max(0.0, planner_ms - step.plan.makespan_us / 1e3),
        peak_bytes=max((p for _, p in measured.values() if p is not None), default=None),
    )
    return record, step.plan
