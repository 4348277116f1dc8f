"""`mdcp plan`: plan one global batch; table, JSON, plan file, PNG figure.

Everything is computed before the first byte is written, and files are moved into place whole, so
that a failure leaves nothing half-written.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megatron_dcp.cli.outputs import check_file, write_whole
from megatron_dcp.config import Oversize
from megatron_dcp.cost import CostProfile, budget_bytes, resolve
from megatron_dcp.data.lengths import read_workload
from megatron_dcp.errors import ConfigError
from megatron_dcp.plan import Placement, StepPlan, Topology, Workload, digest, dumps, lockstep_ranks
from megatron_dcp.planner import PlanRequest, make_plan, strategy_names
from megatron_dcp.planner.oversize import fit_samples

_SHOWN = 40  # placements in the table
GB = 1e9


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="mdcp plan", description=__doc__.split("\n\n")[0])
    p.add_argument(
        "--lengths",
        required=True,
        metavar="FILE",
        help=".txt (one integer per line), .json, .npy, Megatron .idx, - for stdin, or preset:NAME",
    )
    p.add_argument("--ranks", required=True, type=int, help="data ranks (DP x CP)")
    p.add_argument("--ranks-per-node", type=int, default=None, help="default: min(8, ranks)")
    p.add_argument("--cost", default="a100-gpt7b", help="profile preset or profile file (.json)")
    p.add_argument(
        "--memory-gb",
        type=float,
        default=None,
        help="budget per rank in 1e9 bytes; default: the profile's",
    )
    p.add_argument("--lockstep", default="1", help="1 | node | all | ranks per domain")
    p.add_argument("--strategy", default="dcp", help=f"one of {', '.join(strategy_names())}")
    p.add_argument("--pipeline-stages", type=int, default=1)
    p.add_argument("--virtual-stages", type=int, default=1)
    p.add_argument("--recompute", choices=("auto", "off"), default="auto")
    p.add_argument(
        "--oversize",
        choices=("error", "drop", "truncate"),
        default="error",
        help="what happens to a sample that fits on no block",
    )
    p.add_argument(
        "--samples", type=int, default=None, help="draw this many from the file or preset"
    )
    p.add_argument(
        "--shape-quantum",
        type=int,
        default=0,
        metavar="TOKENS",
        help="round every length up to a multiple first (torch.compile: fewer shapes); 0: off",
    )
    p.add_argument("--seed", type=int, default=0, help="of the draw")
    p.add_argument("--step", type=int, default=0, help="step number written into the plan")
    p.add_argument("--out", type=Path, default=None, metavar="PLAN.json")
    p.add_argument("--figure", type=Path, default=None, metavar="PLAN.png")
    p.add_argument("--json", action="store_true", help="print the plan file on stdout")
    return p  # fmt: skip


def _profile(args: argparse.Namespace) -> CostProfile:
    profile = resolve(args.cost)
    if args.memory_gb is None:
        return profile
    return profile.with_budget(budget_bytes(args.memory_gb))


def _fitted(request: PlanRequest, oversize: Oversize) -> PlanRequest:
    """Apply `oversize` to the workload; says on stderr what it changed."""
    if oversize == "error":  # the planner names the sample
        return request
    lengths, shapes = request.workload.lengths, request.workload.shapes
    fitted = fit_samples(
        lengths,
        range(len(lengths)),
        request.cost,
        request.budget_bytes,
        oversize,
        recompute=request.recompute,
    )
    long = fitted.dropped or fitted.cut
    if not long:
        return request
    if shapes is not None and fitted.cut:
        raise ConfigError("--oversize truncate cannot cut a video; use drop")
    print(f"mdcp plan: {oversize} {len(long)} samples that fit on no block: ids {list(long[:8])}"
          f"{' ...' if len(long) > 8 else ''}", file=sys.stderr)  # fmt: skip
    workload = Workload(
        lengths=fitted.lengths,
        shapes=None if shapes is None else tuple(shapes[i] for i in fitted.kept),
    )
    return replace(request, workload=workload)


def request_of(args: argparse.Namespace) -> PlanRequest:
    """The PlanRequest that the options describe; raises ConfigError."""
    if not 0 <= args.step < 2**63:
        raise ConfigError(f"--step {args.step}: steps are numbered from 0")
    per_node = min(8, args.ranks) if args.ranks_per_node is None else args.ranks_per_node
    topology = Topology(
        data_ranks=args.ranks,
        ranks_per_node=per_node,
        pipeline_stages=args.pipeline_stages,
        virtual_stages=args.virtual_stages,
    )
    workload = read_workload(args.lengths, samples=args.samples, seed=args.seed)
    request = PlanRequest(
        workload=workload.rounded(args.shape_quantum),
        topology=topology,
        profile=_profile(args),
        lockstep=lockstep_ranks(args.lockstep, topology),
        recompute=args.recompute == "auto",
        step=args.step,
    )
    return _fitted(request, args.oversize)


def _degrees(plan: StepPlan) -> Iterator[str]:
    by_degree: dict[int, list[Placement]] = {}
    for p in plan.placements:
        by_degree.setdefault(p.degree, []).append(p)
    for degree in sorted(by_degree, reverse=True):
        some = by_degree[degree]
        samples = sum(len(p.samples) for p in some)
        tokens = sum(plan.tokens_of(p) for p in some)
        recompute = sum(1 for p in some if p.recompute)
        yield (f"  {degree:>6}  {len(some):>10}  {samples:>7}  {tokens:>10}  {recompute:>9}"
               f"  {sum(p.time_us for p in some) / len(some) / 1e3:>12.1f}")  # fmt: skip


def table(plan: StepPlan) -> str:
    """The plan for people: totals, placements by degree, and the first placements."""
    t, info = plan.topology, plan.info
    lines = [
        f"strategy {plan.strategy} ({plan.algorithm}), cost {plan.cost.name} {plan.cost.digest}",
        f"{len(plan.lengths)} samples, {plan.workload.tokens} tokens on {t.data_ranks} ranks "
        f"({t.ranks_per_node} per node), lockstep {plan.lockstep}, "
        f"budget {plan.budget_bytes / GB:.3f} GB",
        f"makespan {plan.makespan_us / 1e3:.1f} ms, lower bound {plan.lower_bound_us / 1e3:.1f} ms "
        f"(gap {100 * plan.gap:.2f} %), idle {100 * float(info['idle']):.2f} %, "
        f"planned in {int(info['planner_us']) / 1e3:.2f} ms",
        f"digest {digest(plan)}",
        "",
        "  degree  placements  samples      tokens  recompute  mean ms each",
        *_degrees(plan),
        "",
        "  slot   ranks            scheme     recompute  samples    tokens        ms        GB",
    ]
    for p in plan.placements[:_SHOWN]:
        ranks = f"{p.first_rank}..{p.first_rank + p.degree - 1}"
        scheme = p.scheme if p.scheme != "hybrid" else f"hybrid/{p.inner_degree}"
        lines.append(
            f"  {p.slot:>4}   {ranks:<15}  {scheme:<9}  {p.recompute:>9}  {len(p.samples):>7}"
            f"  {plan.tokens_of(p):>8}  {p.time_us / 1e3:>8.1f}  {p.bytes / GB:>8.3f}"
        )
    if len(plan.placements) > _SHOWN:
        lines.append(f"  ... and {len(plan.placements) - _SHOWN} more (--json or --out has them)")
    return "\n".join(lines)


def _figure(plan: StepPlan) -> bytes:
    from megatron_dcp.observe.timeline import draw_step

    title = (f"{plan.strategy}: {plan.makespan_us / 1e3:.1f} ms predicted, "
             f"gap {100 * plan.gap:.2f} %, {plan.topology.data_ranks} ranks")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        return draw_step(plan, [], Path(folder) / "plan.png", title).read_bytes()


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    for path in (args.out, args.figure):
        if path is not None:
            check_file(path)
    plan = make_plan(request_of(args), args.strategy)
    outputs = [(args.out, (dumps(plan) + "\n").encode())] if args.out else []
    if args.figure:
        outputs.append((args.figure, _figure(plan)))
    for path, data in outputs:
        write_whole(path, data)
    print(dumps(plan) if args.json else table(plan))
    for path, _ in outputs:
        print(f"mdcp plan: wrote {path}", file=sys.stderr)
    return 0
