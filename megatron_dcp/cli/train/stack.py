"""One model on these ranks: what calibration found about it, and profiles for any link.

Calibration runs once, when a profile is first asked for; every run of a suite plans with what it
found, each with its own link and memory budget. All ranks take rank 0's profile, so plans agree.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dcp.cli.train.calibrate import (
    ComputeFit,
    RunPack,
    build_profile,
    count_kept_bytes,
    fit_compute,
    fit_link,
    fit_overlap,
)
from megatron_dcp.cli.train.options import SCALE_RATIO
from megatron_dcp.cli.train.scale import paced_us_per_byte
from megatron_dcp.cost import CostProfile, Link, ModelShape, dumps, from_object
from megatron_dcp.cost.profile import Overlap
from megatron_dcp.dist import DataWorld, LinkPacer, gather_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Linked:
    """A profile for a link. bytes_per_s: pace of what a rank sends, None: loopback as it is."""

    what: str
    profile: CostProfile
    bytes_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What calibration found on these cores. link: us per byte, us per message."""

    compute: ComputeFit
    kept: float
    recomputed: float
    link: tuple[float, float]


class Stack:
    """run: forward and backward of one pack on this rank. parameters: not counted as activations.
    Methods are collective: all ranks call them alike."""

    def __init__(
        self,
        *,
        run: RunPack,
        parameters: Sequence[Tensor],
        shape: ModelShape,
        max_length: int,
        say: Any,
    ) -> None:
        self.run, self.parameters, self.shape = run, list(parameters), shape
        self.max_length, self.say = max_length, say
        self.device = self.parameters[0].device
        started = dist.is_initialized()
        self.rank = dist.get_rank() if started else 0
        self.size = dist.get_world_size() if started else 1

    @cached_property
    def measured(self) -> Measured:
        self.say(f"calibrating on {self.size} rank(s)")
        world = DataWorld(device=self.device)
        try:
            layers = self.shape.layers
            compute = fit_compute(world, self.run, layers, self.max_length)
            kept, recomputed = count_kept_bytes(world, self.run, self.parameters, layers)
            link = fit_link(world)
        finally:
            world.close()
        return Measured(compute=compute, kept=kept, recomputed=recomputed, link=link)

    def profile(self, budget_tokens: int | None, us_per_byte: float | None = None) -> CostProfile:
        """These cores with a link (default: the loopback) and a budget in tokens."""
        m = self.measured
        per_byte, latency = m.link
        link = Link(
            max_degree=max(self.size, 2),
            us_per_byte=per_byte if us_per_byte is None else us_per_byte,
            latency_us=latency,
        )
        own = build_profile(
            name="this-cpu", shape=self.shape, compute=m.compute, links=[link], kept=m.kept,
            recomputed=m.recomputed, budget_tokens=budget_tokens, overlap=Overlap(),
        )  # fmt: skip
        return of_rank_0(own, self.device)

    def linked(
        self, scale_model: str, budget_tokens: int | None, *, mbytes_per_s: float | None = None
    ) -> Linked:
        """The profile and pace of a scale model, or of a link of a given rate."""
        base = self.profile(budget_tokens)
        rate, what = None, f"{self.size} ranks, loopback as it is"
        if self.size > 1 and scale_model != "none":
            rate = 1e6 / paced_us_per_byte(base, SCALE_RATIO[scale_model])
            what = f"{self.size} ranks, scale model {scale_model}"
        elif self.size > 1 and mbytes_per_s is not None:
            rate = mbytes_per_s * 1e6
            what = f"{self.size} ranks, link of {mbytes_per_s:g} MB/s"
        if rate is None:
            return Linked(what=what, profile=base, bytes_per_s=None)
        # A paced message takes the pacer's time or the loopback's, whichever is longer.
        profile = self.profile(budget_tokens, max(1e6 / rate, self.measured.link[0]))
        profile = replace(profile, overlap=self._overlap(profile, rate))
        return Linked(what=what, profile=profile, bytes_per_s=rate)

    def _overlap(self, profile: CostProfile, rate: float) -> Overlap:
        """Measured on the wire that the run will use; rank 0's."""
        world = DataWorld(device=self.device)
        world.wire.pacer = LinkPacer(rate)
        overlap, error = fit_overlap(world, self.run, profile, self.max_length)
        world.wire.pacer = None
        self.say(f"overlap {overlap}, points fitted within {error:.1%}")
        world.close()
        return of_rank_0(replace(profile, overlap=overlap), self.device).overlap


def of_rank_0(profile: CostProfile, device: torch.device) -> CostProfile:
    """All ranks plan with the same profile: rank 0's. Collective; device: where it communicates."""
    world = DataWorld(device=device)
    text = gather_bytes(world, dumps(profile).encode())[0]
    world.close()
    return from_object(json.loads(text))
