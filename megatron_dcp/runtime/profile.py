"""Measure a model's microbatches on this device and fit its cost profile (`mdcp profile`).

Every rank runs the same cases in the same order. A case is one forward and backward of a microbatch
under a placement, nothing else: no reduction, no optimizer. Whether a case ran, how long it took
(the slowest rank) and whether it ran out of memory is agreed over all ranks after each repeat, so
that no rank decides alone: a rank that runs out of memory in a case without communication still
reaches the agreement, and larger cases are then ruled out for all. Shared cases run only where
the same tokens per rank fitted alone.

Times are the best of a few repeats, ended early once two agree: what a neighbour on the machine
adds is never negative. For the same reason the grid is measured in several rounds while
`limit_s` lasts, and a case keeps its best: no term is charged for what the machine did while its
cases ran. Memory is read in the warm-up run. On a shared CPU `clock="cpu"` counts the
process's own time instead of the wall's in cases without communication. After `limit_s` every
case runs once.

Measured points are appended to a points file by rank 0; a later call with the same fingerprint goes
on where it ended.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_dcp.cost.cases import Case, Point, grid, point_from_object, ruled_out
from megatron_dcp.cost.model import CostModel, Mode
from megatron_dcp.cost.profile import CostProfile, Link, ModelShape
from megatron_dcp.cost.profiling import Fitted, fit_profile
from megatron_dcp.dist import DataWorld, PlacementContext, make_context, use_placement
from megatron_dcp.errors import AgreementError, ConfigError
from megatron_dcp.plan import Placement, Topology
from megatron_dcp.runtime.fingerprint import model_fingerprint
from megatron_dcp.runtime.memory import PeakMemory

LossFn = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]
Progress = Callable[[int, int, str], None]
_AGREE = 1.03  # two repeats so close to each other are believed


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is profiled. build: depth -> the model with that many layers, on the device.

    loss: (model, input_ids [t], position_ids [t], labels [t]) -> scalar loss sum with a graph.
    layers: attribute path of the list of layers inside the model.
    """

    shape: ModelShape
    build: Callable[[int], nn.Module]
    loss: LossFn
    layers: str = "layers"
    pairs: str = "causal"


def truncated(model: nn.Module, layers: str) -> Callable[[int], nn.Module]:
    """`build` for any module with a list of layers: a copy that keeps the first `depth` ones."""
    found = layer_list(model, layers)

    def build(depth: int) -> nn.Module:
        if not 1 <= depth <= len(found):
            raise ConfigError(f"depth {depth} asked, {layers!r} holds {len(found)} layers")
        cut = copy.deepcopy(model)
        parent, _, name = layers.rpartition(".")
        owner = cut.get_submodule(parent) if parent else cut
        setattr(owner, name, nn.ModuleList(list(layer_list(cut, layers))[:depth]))
        return cut

    return build


def layer_list(model: nn.Module, path: str) -> nn.ModuleList:
    """The list of layers at an attribute path; ConfigError names the lists that there are."""
    try:
        found = model.get_submodule(path)
    except AttributeError:
        found = None
    if not isinstance(found, nn.ModuleList):
        lists = [n for n, m in model.named_modules() if isinstance(m, nn.ModuleList)]
        raise ConfigError(f"no list of layers at {path!r} in the model; lists are at {lists}")
    return found


class _Recomputed(nn.Module):
    """A layer whose activations are dropped and computed again in backward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.layer, *args, use_reentrant=False, **kwargs)


@dataclass(slots=True, kw_only=True)
class Profiler:
    """Runs cases. repeats: timed runs per case at most, after one warm-up.

    clock: wall, or cpu (see the module docstring). fail: called before each run, may raise what a
    device would (for tests of the agreement).
    """

    world: DataWorld
    subject: Subject
    repeats: int = 5
    clock: Literal["wall", "cpu"] = "wall"
    hurry: bool = False
    fail: Callable[[Case], None] | None = None
    _model: nn.Module | None = None
    _built: tuple[int, int] = (0, 0)

    def model_for(self, case: Case) -> nn.Module:
        """The model of a case's depth with its first `recompute` layers recomputed; one is kept."""
        if self._model is None or self._built != (case.depth, case.recompute):
            self._model = None
            model = self.subject.build(case.depth)
            layers = layer_list(model, self.subject.layers)
            for i in range(case.recompute):
                layers[i] = _Recomputed(layers[i])
            self._model, self._built = model, (case.depth, case.recompute)
        return self._model

    def measure(self, case: Case) -> Point:
        """One case on all ranks; the same Point on each. Collective."""
        times: list[float] = []
        peaks: list[float] = []
        for repeat in range(2 if self.hurry else self.repeats + 1):
            time_us, peak, oom = self._agree(*self._run(case, memory=not repeat))
            if oom:
                self._model = None
                return Point(case=case, oom=True)
            peaks.append(peak)
            if repeat:
                times.append(time_us)
            if len(times) > 1 and sorted(times)[1] <= _AGREE * min(times):
                break
        return Point(
            case=case,
            time_us=min(times),
            peak_bytes=int(max(peaks)) if max(peaks) > 0 else None,
        )

    def _run(self, case: Case, *, memory: bool) -> tuple[float, float, bool]:
        """(us, peak bytes, out of memory) of this rank."""
        try:
            model = self.model_for(case)
            context = self._context(case)
            batch = self._batch(context)
            if case.degree > 1:
                self.world.rendezvous(context.placement.first_rank, case.degree)
            if self.fail is not None:
                self.fail(case)
            peak = PeakMemory(self.world.device) if memory else None
            begin = self._clock(case)
            with use_placement(context):
                self.subject.loss(model, *batch).backward()  # type: ignore[no-untyped-call]
            took = self._clock(case) - begin
            rise = float(peak.peak_bytes() or 0) if peak is not None else 0.0
            for p in model.parameters():
                p.grad = None
            return took, rise, False
        except (torch.OutOfMemoryError, MemoryError):
            if case.degree > 1:  # the other ranks of the block are inside a collective
                raise
            if self.world.device.type == "cuda":
                torch.cuda.empty_cache()
            return 0.0, 0.0, True

    def _clock(self, case: Case) -> float:
        """us"""
        if self.clock == "cpu" and case.degree == 1:
            return time.process_time_ns() / 1e3
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
        return time.monotonic_ns() / 1e3

    def _context(self, case: Case) -> PlacementContext:
        first = self.world.rank // case.degree * case.degree
        placement = Placement(
            slot=0, first_rank=first, degree=case.degree, scheme=case.scheme,
            inner_degree=case.inner_degree, samples=tuple(range(len(case.lengths))),
            recompute=case.recompute,
        )  # fmt: skip
        return make_context(self.world, placement, case.lengths)

    def _batch(self, context: PlacementContext) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(context.rows)
        vocab = self.subject.shape.vocab
        ids = torch.randint(vocab, (context.rows,), generator=generator)
        labels = torch.randint(vocab, (context.rows,), generator=generator)
        device = self.world.device
        return ids.to(device), context.position_ids, labels.to(device)

    def _agree(self, time_us: float, peak: float, oom: bool) -> tuple[float, float, bool]:
        """Largest of each over all ranks."""
        values = torch.tensor([time_us, peak, float(oom)], dtype=torch.float64,
                              device=self.world.device)  # fmt: skip
        if self.world.size > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX, group=self.world.group)
        return float(values[0]), float(values[1]), bool(values[2] > 0)


def modes_to_measure(shape: ModelShape, topology: Topology) -> dict[int, list[Mode]]:
    """Powers of two up to all ranks; per degree the first legal scheme and `ring`."""
    probe = CostProfile(
        name="probe", model=shape, links=(Link(max_degree=1, us_per_byte=0.0, latency_us=0.0),)
    )
    cost = CostModel(probe, topology)
    out: dict[int, list[Mode]] = {}
    degree = 2
    while degree <= topology.data_ranks:
        if topology.legal_degree(degree) and topology.data_ranks % degree == 0:
            legal = cost.modes(degree)
            ring = [m for m in legal if m.scheme == "ring"]
            out[degree] = list(dict.fromkeys([legal[0], *ring]))
        degree *= 2
    return out


def fingerprint(world: DataWorld, subject: Subject) -> dict[str, Any]:
    """What a profile is valid for: device, weights, model shape, torch, ranks."""
    s = subject.shape
    return {
        **model_fingerprint(subject.build(s.layers), world.device),
        "model": f"{s.layers}x{s.hidden}, {s.heads}/{s.kv_heads}x{s.head_dim}, {s.vocab}",
        "element_bytes": s.element_bytes,
        "torch": torch.__version__.partition("+")[0],
        "data_ranks": world.size,
    }


def profile_model(
    world: DataWorld,
    subject: Subject,
    topology: Topology,
    *,
    name: str,
    max_tokens: int,
    points_file: Path | None = None,
    repeats: int = 5,
    rounds: int = 1,
    limit_s: float = 120.0,
    clock: Literal["wall", "cpu"] = "wall",
    budget_bytes: int = 0,
    state_bytes_per_parameter: int = 16,
    progress: Progress | None = None,
    fail: Callable[[Case], None] | None = None,
) -> Fitted:
    """Measure the grid and fit it; the same result on every rank. Collective.

    rounds: how often the cases of this call are measured while time is left; each keeps its best.
    state_bytes_per_parameter: weight, gradient and two Adam moments (fp32: 16).
    """
    mine = fingerprint(world, subject)
    cases = grid(subject.shape.layers, max_tokens, modes_to_measure(subject.shape, topology))
    done = {p.case: p for p in _resume(world, points_file, mine)}
    blocks = [
        (first, m.inner_degree)
        for d, ms in modes_to_measure(subject.shape, topology).items()
        for m in ms
        for first in range(0, world.size, m.inner_degree)
        if m.inner_degree > 1
    ]
    world.ensure_groups(dict.fromkeys(blocks))
    profiler = Profiler(world=world, subject=subject, repeats=repeats, clock=clock, fail=fail)
    begin = time.monotonic()
    fresh: list[Case] = []

    def keep(point: Point) -> None:
        done[point.case] = point
        if world.rank == 0 and points_file is not None:
            _append(points_file, mine, point)

    for k, case in enumerate(cases):
        if case not in done and not ruled_out(case, done.values()):
            late = time.monotonic() - begin > limit_s
            profiler.hurry = profiler.hurry or _any(world, late)
            keep(profiler.measure(case))
            fresh.append(case)
        if progress is not None and world.rank == 0:
            progress(k + 1, len(cases), _say(case, done.get(case)))
    again = [c for _ in range(rounds - 1) for c in fresh if not done[c].oom]
    for k, case in enumerate(again):
        if _any(world, time.monotonic() - begin > limit_s):
            break
        point = profiler.measure(case)
        if not point.oom and point.time_us < done[case].time_us:
            keep(replace(done[case], time_us=point.time_us))
        if progress is not None and world.rank == 0:
            progress(k + 1, len(again), _say(case, done[case]))
    static = mine["parameters"] * state_bytes_per_parameter
    return fit_profile(
        [done[c] for c in cases if c in done], subject.shape, name=name, pairs=subject.pairs,
        static_bytes=static, budget_bytes=budget_bytes, fingerprint=mine,
    )  # fmt: skip


def _any(world: DataWorld, flag: bool) -> bool:
    """Whether it is so on any rank. Collective."""
    value = torch.tensor([float(flag)], device=world.device)
    if world.size > 1:
        dist.all_reduce(value, dist.ReduceOp.MAX, group=world.group)
    return bool(value[0] > 0)


def _say(case: Case, point: Point | None) -> str:
    what = f"{case.depth} layers, {case.tokens} tokens in {len(case.lengths)}, degree {case.degree}"
    if point is None:
        return f"{what}: ruled out by an out-of-memory point"
    return f"{what}: " + ("out of memory" if point.oom else f"{point.time_us / 1e3:.1f} ms")


def _append(path: Path, mine: Mapping[str, Any], point: Point) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.write_text(json.dumps({"fingerprint": dict(mine)}) + "\n")
    with path.open("a") as file:
        file.write(json.dumps(point.to_object()) + "\n")


def _resume(world: DataWorld, path: Path | None, mine: Mapping[str, Any]) -> list[Point]:
    """Points of an earlier call, read by rank 0 and handed to all. Collective. A last line without
    its end was cut by whatever ended that call, and counts for nothing."""
    text, trouble = b"", ""
    if world.rank == 0 and path is not None and path.exists():
        whole, end, cut = path.read_bytes().rpartition(b"\n")
        try:
            lines = [json.loads(line) for line in whole.splitlines()]
            head = lines[0]["fingerprint"] if lines else dict(mine)
            if head != dict(mine):
                trouble = f"{path} was measured with {head}, here is {dict(mine)}"
        except (ValueError, KeyError, TypeError) as error:
            trouble = f"{path} is not a file of measured points ({error})"
        if not trouble and not lines:
            path.unlink()
        elif not trouble:
            text = whole
            if cut:
                path.write_bytes(whole + end)
    text, trouble = _share(world, text), _share(world, trouble.encode()).decode()
    if trouble:
        raise ConfigError(f"{trouble}; remove it")
    return [point_from_object(json.loads(line)) for line in text.splitlines()[1:]]


def _share(world: DataWorld, data: bytes) -> bytes:
    """Rank 0's bytes on every rank."""
    if world.size == 1:
        return data
    size = torch.tensor([len(data)], dtype=torch.int64, device=world.device)
    world.broadcast_([size])
    body = torch.zeros(int(size), dtype=torch.uint8, device=world.device)
    if world.rank == 0 and data:
        body.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    if int(size):
        world.broadcast_([body])
    return bytes(body.cpu().tolist())


def check_same(world: DataWorld, fitted: Fitted) -> None:
    """All ranks hold the same profile; AgreementError otherwise. Collective."""
    digest = fitted.profile.ref.digest.encode()
    if _share(world, digest) != digest:
        raise AgreementError("ranks fitted different cost profiles; this is a fault, report it")
