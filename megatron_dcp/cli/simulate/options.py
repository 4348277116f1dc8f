"""Options of `mdcp simulate`, checked, and the objects made from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
import tyro

from megatron_dcp.cost import CostProfile, budget_bytes, resolve
from megatron_dcp.cost.derive import always_recomputed
from megatron_dcp.cost.derive import profile as analytic
from megatron_dcp.cost.models import MODELS
from megatron_dcp.data.generators import LENGTH_PRESETS, generate
from megatron_dcp.data.lengths import read_lengths
from megatron_dcp.errors import ConfigError
from megatron_dcp.plan import Topology, Workload, lockstep_ranks
from megatron_dcp.sim import Contention, Noise, ReplayOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """Compare strategies over many steps on a cluster that you describe; needs no GPU and no torch.

    Every number that comes out is simulated under a cost model (docs/cost_model.md).
    """

    lengths: str = "preset:wiki"
    """A length file (.txt .json .npy .idx), `-`, or preset:NAME."""
    ranks: int = 64
    """Data ranks (DP x CP)."""
    ranks_per_node: int = 8
    steps: int = 10
    batch: int = 512
    """Samples of one global batch."""
    hardware: str | None = None
    """Preset: a100-40g a100-80g h100 h200 b200 cpu-2core; with --model."""
    model: str | None = None
    """Preset: gpt-1.3b ... gpt-70b, dit-1.2b-1d ...; with --hardware."""
    cost: str | None = None
    """A profile preset or file instead of --hardware and --model; default a100-gpt7b."""
    memory_gb: float | None = None
    """With --hardware: memory of a rank; with --cost: the budget. 1e9 bytes."""
    lockstep: str = "1"
    """1 | node | all | ranks per lockstep domain."""
    recompute: Literal["auto", "off", "always"] = "auto"
    """auto: as plans choose; off: never; always: every layer of every microbatch, needed or not."""
    strategies: str = "bucket,packed,static,dcp"
    """Names separated by commas, or all."""
    seeds: int = 1
    """Number of repeats with other samples and noise."""
    seed: int = 0
    """First seed."""
    out: Path | None = None
    """Folder for report, figures and result file."""
    json: bool = False
    """One JSON object on stdout and nothing else."""
    sweep: str | None = None
    """Any of ranks, context, network, memory, model (commas, or all): figures over that axis."""
    context: int | None = None
    """Longest sample in tokens; text is cut, video loses frames."""
    shape_quantum: int = 0
    """Round every length up to a multiple of so many tokens (torch.compile: fewer shapes); the
    padding that this adds counts as padding. 0: off."""
    network_gbit_per_s: float | None = None
    """With --hardware: network rate of one rank instead of the datasheet's."""
    pipeline_stages: int = 1
    virtual_stages: int = 1
    noise_slot: float = 0.0
    """Sigma of the time of each microbatch on each rank (0.05 = 5 %)."""
    noise_rank: float = 0.0
    """Sigma of the speed of each rank."""
    fabric_senders: float | None = None
    """Cross-node transfers that the network carries at full rate at once; default: all."""
    node_senders: float | None = None
    """The same for the ranks of one node; default: all."""
    overlap_reduction: bool = False
    """Hide the gradient reduction under the last backward of the slowest rank."""
    limit_s: float = 60.0
    """Time of the whole comparison, shared by the strategies; steps beyond it are left out and the
    table says so, one of each strategy runs in any case. 0: no limit. Each --sweep has as much."""
    plan_limit_s: float | None = None
    """The same for each strategy on its own, instead of --limit-s."""
    presets: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the hardware and model presets and leave."""

    def __post_init__(self) -> None:
        for name in ("ranks", "ranks_per_node", "steps", "batch", "seeds", "context"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} is {value}; use >= 1")
        if self.shape_quantum < 0:
            raise ConfigError(f"--shape-quantum is {self.shape_quantum}; use >= 0")
        if self.seed < 0:
            raise ConfigError(f"--seed is {self.seed}; use >= 0")
        for name in ("limit_s", "plan_limit_s"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ConfigError(f"--{name.replace('_', '-')} is {value}; use >= 0")
        rate = self.network_gbit_per_s
        if rate is not None and not 0 < rate < math.inf:
            raise ConfigError(f"--network-gbit-per-s is {rate}; use a number above 0")
        if (self.hardware is None) != (self.model is None):
            raise ConfigError("--hardware and --model go together; or pass --cost")
        if self.cost is not None and self.hardware is not None:
            raise ConfigError("--cost already holds hardware and model: leave out --hardware")
        if self.network_gbit_per_s is not None and self.hardware is None:
            raise ConfigError("--network-gbit-per-s changes a hardware preset: pass --hardware")

    @property
    def topology(self) -> Topology:
        return Topology(
            data_ranks=self.ranks,
            ranks_per_node=min(self.ranks_per_node, self.ranks),
            pipeline_stages=self.pipeline_stages,
            virtual_stages=self.virtual_stages,
        )

    @property
    def domain(self) -> int:
        return lockstep_ranks(self.lockstep, self.topology)

    def profile(self) -> CostProfile:
        found = self._profile()
        return always_recomputed(found) if self.recompute == "always" else found

    def _profile(self) -> CostProfile:
        if self.hardware is not None and self.model is not None:
            return analytic(
                self.hardware, self.model, self.topology, lockstep=self.domain,
                memory_gb=self.memory_gb, net_gbit_per_s=self.network_gbit_per_s,
            )  # fmt: skip
        found = resolve(self.cost or "a100-gpt7b")
        return found if self.memory_gb is None else found.with_budget(budget_bytes(self.memory_gb))

    def replay_options(self, seed: int) -> ReplayOptions:
        parameters = MODELS[self.model].parameters if self.model is not None else None
        return ReplayOptions(
            contention=Contention(
                fabric_senders=self.fabric_senders, node_senders=self.node_senders
            ),
            noise=Noise(slot=self.noise_slot, rank=self.noise_rank, seed=seed),
            parameters=parameters,
            overlap_reduction=self.overlap_reduction,
            keep_spans=False,
        )

    def workloads(self, seed: int) -> Iterator[Workload]:
        """One global batch per step."""
        pool = self._pool(seed)
        for step in range(self.steps):
            chosen = pool(step)
            yield chosen if self.context is None else cut(chosen, self.context)

    def _pool(self, seed: int) -> Callable[[int], Workload]:
        if self.lengths.startswith("preset:"):
            name = self.lengths.partition(":")[2]
            if name not in LENGTH_PRESETS:
                raise ConfigError(
                    f"--lengths {self.lengths!r}: known presets are {', '.join(LENGTH_PRESETS)}"
                )
            drawn = generate(name, self.batch * self.steps, seed).workload

            def slice_of(step: int) -> Workload:
                part = slice(step * self.batch, (step + 1) * self.batch)
                shapes = None if drawn.shapes is None else drawn.shapes[part]
                return Workload(lengths=drawn.lengths[part], shapes=shapes)

            return slice_of
        lengths = lengths_of(self.lengths)

        def draw(step: int) -> Workload:
            rng = np.random.default_rng([seed, step])
            chosen = rng.choice(lengths, self.batch, replace=self.batch > len(lengths))
            return Workload(lengths=tuple(int(x) for x in chosen))

        return draw


@cache
def lengths_of(source: str) -> npt.NDArray[np.int64]:
    """Lengths in a file or on stdin. Read once: every seed and point of a sweep draws from them."""
    return np.asarray(read_lengths(source), dtype=np.int64)


def cut(workload: Workload, limit: int) -> Workload:
    """Samples of at most `limit` tokens: text is cut, video loses frames (one frame stays)."""
    if workload.shapes is None:
        return Workload(lengths=tuple(min(n, limit) for n in workload.lengths))
    shapes = [(max(1, min(f, limit // (h * w))), h, w) for f, h, w in workload.shapes]
    return Workload(lengths=tuple(f * h * w for f, h, w in shapes), shapes=tuple(shapes))
