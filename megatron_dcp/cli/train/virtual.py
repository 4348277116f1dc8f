"""Virtual ranks of `mdcp train`: 8- and 32-rank plans replayed with measured compute.

Every placement of the plan is run on one core with its real shapes (`runtime.virtual`); links are
those of the scale model, inside a node and across nodes. The processes of the run share the
placements out, one core each, and exchange the times.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_dcp.cli.train.model import Gpt, loss_sum
from megatron_dcp.cost import CostModel, CostProfile, Link
from megatron_dcp.data.stdlib import TextCorpus
from megatron_dcp.dist import DataWorld, PlacementContext, gather_bytes, use_placement
from megatron_dcp.observe.run_dir import write_plan
from megatron_dcp.observe.summary import RunSummary, StepRecord
from megatron_dcp.observe.timeline import draw_step
from megatron_dcp.plan import Topology, Workload
from megatron_dcp.planner import PlanRequest, make_plan
from megatron_dcp.runtime.virtual import measured_step, time_placements


def run_pack(model: Gpt, context: PlacementContext) -> None:
    """Forward and backward of one rank's share of a placement, on random tokens."""
    ids = torch.randint(0, model.config.vocab, (context.rows,))
    with use_placement(context):
        torch.autograd.backward(loss_sum(model(ids, context.position_ids), ids))
    model.zero_grad(set_to_none=True)


def virtual_run(
    *,
    ranks: int,
    ranks_per_node: int,
    samples: int,
    repeats: int,
    seed: int,
    strategies: Sequence[str],
    corpus: TextCorpus,
    model: Gpt,
    profile: CostProfile,
    node_us_per_byte: float,
    cross_us_per_byte: float,
    out: Path,
    say: Any,
) -> RunSummary:
    """Replay one global batch per repeat under every strategy; rank 0 writes into `out`."""
    world = DataWorld()
    links = (
        Link(max_degree=ranks_per_node, us_per_byte=node_us_per_byte, latency_us=0.0),
        Link(max_degree=max(ranks, ranks_per_node + 1), us_per_byte=cross_us_per_byte,
             latency_us=0.0),
    )  # fmt: skip
    profile = replace(profile, name=f"{profile.name}-virtual{ranks}", links=links)
    topology = Topology(data_ranks=ranks, ranks_per_node=ranks_per_node)
    summary = RunSummary(
        what=f"{ranks} virtual ranks, {ranks_per_node} per node: measured compute, modelled links",
        config={"ranks": ranks, "ranks_per_node": ranks_per_node, "global_batch": samples,
                "corpus": corpus.name, "budget_bytes": profile.budget_bytes},
    )  # fmt: skip
    lengths = np.asarray(corpus.lengths)
    for repeat in range(repeats):
        chosen = np.random.default_rng([seed, repeat]).choice(lengths, samples, replace=False)
        workload = Workload(lengths=tuple(int(n) for n in chosen))
        request = PlanRequest(workload=workload, topology=topology, profile=profile, step=repeat)
        for strategy in strategies:
            plan = make_plan(request, strategy)
            mine = [i for i in range(len(plan.placements)) if i % world.size == world.rank]
            times = time_placements(plan, mine, lambda c: run_pack(model, c))
            shares = [json.loads(b) for b in gather_bytes(world, json.dumps(times).encode())]
            measured = {int(i): t for share in shares for i, t in share.items()}
            step = measured_step(plan, CostModel(profile, topology), measured)
            summary.add(strategy, StepRecord(
                repeat=repeat, tokens=workload.tokens, step_s=step.plan.makespan_us / 1e6,
                predicted_s=plan.makespan_us / 1e6, idle=step.plan.info["idle"], comm=step.comm,
            ))  # fmt: skip
            if world.rank == 0:
                _keep(out, strategy, plan, step.plan, repeat)
            say(f"virtual {ranks} ranks, repeat {repeat + 1}/{repeats}: {strategy}")
    if world.rank == 0:
        summary.write(out)
    world.close()
    return summary


def _keep(out: Path, strategy: str, plan: Any, timed: Any, repeat: int) -> None:
    """The plan as made, and its lanes with the measured times."""
    write_plan(out, plan)
    if repeat == 0:
        title = f"{strategy}, {plan.topology.data_ranks} virtual ranks, measured compute"
        draw_step(timed, [], out / f"timeline-{strategy.replace(':', '-')}.png", title)
