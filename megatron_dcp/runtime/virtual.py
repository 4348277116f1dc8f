"""Virtual ranks: run one rank's share of any placement on one process, with real shapes.

Every scheme talks to its block through `DataWorld` and `Wire` alone. Here both are replaced by ones
that have no peers: what would arrive is filled with this rank's own bytes, so sizes, kernels,
copies and memory are those of the real rank while the values are meaningless. Time measured this
way is the compute of a rank in a block of any size; communication is added from a link model.

Does not train anything: gradients computed here are garbage by design.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dcp.cost import CostModel, Mode, pack_of
from megatron_dcp.dist import DataWorld, Pending, PlacementContext, Wire, make_context
from megatron_dcp.dist.wire import as_bytes
from megatron_dcp.plan import Placement, StepPlan
from megatron_dcp.plan.replay import idle_share, makespan_us
from megatron_dcp.runtime.memory import PeakMemory


def _fill(target: Tensor, source: Tensor) -> None:
    """Fill target's bytes with source's, repeated."""
    out, data = as_bytes(target), as_bytes(source)
    if not out.numel():
        return
    if not data.numel():
        out.zero_()
        return
    for begin in range(0, out.numel(), data.numel()):
        part = out[begin : begin + data.numel()]
        part.copy_(data[: part.numel()])


class VirtualWire(Wire):
    """A wire without peers: counts what would be sent and fills what would be received."""

    def start_all_to_all(
        self, out: Tensor, send: Tensor, out_rows: Sequence[int], send_rows: Sequence[int],
        group: Any, kind: str,
    ) -> Pending:  # fmt: skip
        self.post(kind, send.numel() * send.element_size() * (len(send_rows) - 1) // len(send_rows))
        _fill(out, send)
        return Pending(self, kind, [], [], None, None)

    def start_exchange(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]],
        group: Any, kind: str,
    ) -> Pending:  # fmt: skip
        self.post(kind, sum(t.numel() * t.element_size() for t, _ in sends))
        for i, (tensor, _) in enumerate(receives):
            _fill(tensor, sends[i % len(sends)][0] if sends else torch.zeros(1, dtype=torch.uint8))
        return Pending(self, kind, [], [], None, None)

    def all_reduce(self, x: Tensor, group: Any, kind: str = "reduce") -> Tensor:
        return x

    def all_gather_rows(self, x: Tensor, group: Any, kind: str) -> Tensor:
        size = group[1]
        self.post(kind, (size - 1) * x.numel() * x.element_size())
        return x.expand(size, *x.shape).contiguous()


class VirtualWorld(DataWorld):
    """Data rank `rank` of `size`, alone on this process. Groups are (first rank, ranks) pairs."""

    def __init__(self, *, rank: int, size: int, device: torch.device | str | None = None) -> None:
        super().__init__(device=device, alone=True)
        self.wire = VirtualWire()
        self.rank, self.size = rank, size
        self.global_ranks = list(range(size))
        self.planes = [self.global_ranks]

    @property
    def group(self) -> dist.ProcessGroup:
        return (0, self.size)  # type: ignore[return-value]

    def ensure_groups(self, blocks: Iterable[tuple[int, int]]) -> int:
        return 0

    def block_group(self, first_rank: int, size: int) -> dist.ProcessGroup:
        return (first_rank, size)  # type: ignore[return-value]

    def rendezvous(self, first_rank: int, size: int) -> None:
        """Nobody to wait for."""


Run = Callable[[PlacementContext], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One rank's forward + backward of a placement. peak_bytes: rise of the allocator's memory;
    None on a CPU, where it is not measured here."""

    us: int
    peak_bytes: int | None = None


def measure_placement(
    plan: StepPlan,
    placement: Placement,
    run: Run,
    *,
    block_rank: int = 0,
    repeats: int = 1,
    device: torch.device | str = "cpu",
) -> Measured:
    """Least wall time in which `run` does one rank's forward + backward of a placement."""
    device, n = torch.device(device), plan.topology.data_ranks
    world = VirtualWorld(rank=placement.first_rank + block_rank, size=n, device=device)
    lengths = [plan.lengths[i] for i in placement.samples]
    grids = plan.workload.shapes
    shapes = None if grids is None else [grids[i] for i in placement.samples]
    cuda = device.type == "cuda"
    times, peaks = [], []
    for _ in range(repeats):
        context = make_context(world, placement, lengths, shapes=shapes)
        peak = PeakMemory(device) if cuda else None
        if cuda:
            torch.cuda.synchronize(device)
        begin = time.perf_counter_ns()
        run(context)
        if cuda:
            torch.cuda.synchronize(device)
        times.append(time.perf_counter_ns() - begin)
        if peak is not None:
            peaks.append(peak.peak_bytes() or 0)
    return Measured(us=min(times) // 1000, peak_bytes=max(peaks, default=None))


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualStep:
    """A step replayed with measured compute and modelled links.

    plan: the same placements with the measured times. comm: share of rank-time that the link model
    adds.
    """

    plan: StepPlan
    comm: float


def time_placements(
    plan: StepPlan, which: Sequence[int], run: Run, *, device: torch.device | str = "cpu"
) -> dict[int, Measured]:
    """Some placements of a plan (by index), run one after another on this process.

    One rank of each block is run, its first: the ranks of a block have equal work to within one
    token per sample and chunk.
    """
    return {i: measure_placement(plan, plan.placements[i], run, device=device) for i in which}


def measured_step(plan: StepPlan, cost: CostModel, compute_us: Mapping[int, int]) -> VirtualStep:
    """Replay a plan with measured compute of every placement (by index) and modelled links."""
    placements: list[Placement] = []
    comm_us = 0.0
    for i, placement in enumerate(plan.placements):
        pack = pack_of(cost.profile, plan.workload, placement.samples)
        mode = Mode(placement.scheme, placement.inner_degree)
        link = cost.parts_us(pack, placement.degree, mode, placement.recompute)[2]
        comm_us += link * placement.degree
        placements.append(replace(placement, time_us=compute_us[i] + round(link)))
    timed = replace(plan, placements=tuple(placements))
    timed = replace(timed, makespan_us=makespan_us(timed))
    timed = replace(timed, info={**plan.info, "idle": idle_share(timed)})
    span = timed.makespan_us * plan.topology.data_ranks
    return VirtualStep(plan=timed, comm=comm_us / span)
