"""The reference trainer's runs: one comparison, or the quickstart suite of them."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
import tyro

from megatron_dcp.cli.train.calibrate import (
    ComputeFit,
    build_profile,
    count_kept_bytes,
    fit_compute,
    fit_link,
    fit_overlap,
)
from megatron_dcp.cli.train.compare import compare
from megatron_dcp.cli.train.long import train_long
from megatron_dcp.cli.train.model import Gpt, GptConfig
from megatron_dcp.cli.train.options import SCALE_RATIO, TrainOptions
from megatron_dcp.cli.train.scale import paced_us_per_byte
from megatron_dcp.cli.train.virtual import run_pack, virtual_run
from megatron_dcp.cost import CostProfile, Link, ModelShape, dumps, from_object
from megatron_dcp.cost.profile import Overlap
from megatron_dcp.data.stdlib import TextCorpus, stdlib_corpus
from megatron_dcp.dist import DataWorld, LinkPacer, PlacementContext, gather_bytes
from megatron_dcp.observe.summary import RunSummary, table_lines
from megatron_dcp.planner.registry import find_strategy
from megatron_dcp.runtime.recompute import wrap_layers

# (ranks, ranks per node) of the virtual clusters. The longest sample (8192 tokens) needs 8 ranks of
# 1024 tokens without recompute, as a 128K context does on ranks that hold 16K.
VIRTUAL = ((8, 4), (32, 8))
VIRTUAL_MEMORY_TOKENS = 1024


def main(argv: list[str]) -> int:
    options = tyro.cli(TrainOptions, args=argv, prog="mdcp train")
    for strategy in options.strategy_names:
        find_strategy(strategy)
    pin_threads()
    if "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    try:
        return _Trainer(options).run()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def pin_threads() -> None:
    """One thread and one core per rank, so that a rank's compute does not depend on the others."""
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity") and "LOCAL_RANK" in os.environ:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"]) % len(cores)]})


@dataclass(slots=True)
class _Measured:
    """What calibration found on these cores."""

    compute: ComputeFit
    kept: float
    recomputed: float
    link: tuple[float, float]


class _Trainer:
    """Holds what all runs of one process share: corpus, initial model, calibration."""

    def __init__(self, options: TrainOptions) -> None:
        self.options = options
        self.begin = time.monotonic()
        world = DataWorld()
        self.rank, self.size = world.rank, world.size
        self.corpus = self._corpus()
        torch.manual_seed(options.seed)
        self.config = GptConfig()
        self.model = Gpt(self.config)
        wrap_layers(self.model.layers)
        world.close()

    @cached_property
    def measured(self) -> _Measured:
        """Calibration, when a run first needs it; all ranks come here together."""
        self.say(f"calibrating on {self.size} rank(s)")
        world = DataWorld()
        try:
            return self._calibrate(world)
        finally:
            world.close()

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(f"[{time.monotonic() - self.begin:6.1f} s] {text}", file=sys.stderr, flush=True)

    def _corpus(self) -> TextCorpus:
        whole = stdlib_corpus()
        corpus = whole.clip(self.options.max_length)
        self.say(
            f"{len(whole)} definitions of the standard library, {sum(whole.lengths)} byte tokens, "
            f"longest {max(whole.lengths)}; {corpus.clipped} cut to {self.options.max_length} "
            f"tokens ({corpus.cut_tokens} tokens left out)"
        )
        return corpus

    def _calibrate(self, world: DataWorld) -> _Measured:
        run, layers = self._run_pack, self.config.layers
        compute = fit_compute(world, run, layers, self.options.max_length)
        kept, recomputed = count_kept_bytes(run, list(self.model.parameters()), layers)
        return _Measured(compute=compute, kept=kept, recomputed=recomputed, link=fit_link(world))

    def _run_pack(self, context: PlacementContext, recompute: int) -> None:
        context.placement = replace(context.placement, recompute=recompute)
        run_pack(self.model, context)

    def _overlap(self, profile: CostProfile, rate: float | None) -> Overlap:
        """Measured on the wire that the run will use; rank 0's."""
        world = DataWorld()
        world.wire.pacer = None if rate is None else LinkPacer(rate)
        overlap, error = fit_overlap(world, self._run_pack, profile, self.options.max_length)
        world.wire.pacer = None
        self.say(f"overlap {overlap}, points fitted within {error:.1%}")
        world.close()
        return _of_rank_0(replace(profile, overlap=overlap)).overlap

    def _profile(
        self, world_bytes: tuple[float, float], budget_tokens: int | None, overlap: Overlap
    ) -> CostProfile:
        """The profile of these cores with a link of (us per byte, us per message); rank 0's."""
        c, m = self.config, self.measured
        shape = ModelShape(
            layers=c.layers, heads=c.heads, kv_heads=c.kv_heads, head_dim=c.head_dim,
            hidden=c.hidden, vocab=c.vocab, element_bytes=4,
        )  # fmt: skip
        link = Link(max_degree=max(self.size, 2), us_per_byte=world_bytes[0],
                    latency_us=world_bytes[1])  # fmt: skip
        own = build_profile(
            name="this-cpu", shape=shape, compute=m.compute, links=[link], kept=m.kept,
            recomputed=m.recomputed, budget_tokens=budget_tokens, overlap=overlap,
        )  # fmt: skip
        return _of_rank_0(own)

    def run(self) -> int:
        """Exit status: 0, or `STOP_STATUS` when preempted after a checkpoint."""
        if self.options.train_steps is not None:
            return train_long(
                self.options, corpus=self.corpus, model=self.model, say=self.say,
                fitted=lambda: self._profile(
                    self.measured.link, self.options.budget_tokens, Overlap()
                ),
            )  # fmt: skip
        if self.options.suite == "one":
            self._show(self.options.out, self._compare(self.options, self.options.out))
            return 0
        out = self.options.out
        results: list[tuple[Path, RunSummary]] = []
        if self.options.suite == "quickstart":
            unpaced = replace(self.options, scale_model="none")
            cross = replace(self.options, scale_model="7b-cross-node")
            for name, options in (("quickstart-unpaced", unpaced), ("quickstart", cross)):
                results.append((out / name, self._compare(options, out / name)))
        if self.options.virtual:
            for ranks, ranks_per_node in VIRTUAL:
                folder = out / f"quickstart-virtual{ranks}"
                results.append((folder, self._virtual(ranks, ranks_per_node, folder)))
        for folder, summary in results:
            self._show(folder, summary)
        return 0

    def _strategies(self) -> list[str]:
        names = self.options.strategy_names
        return [s for s in names if self.size > 1 or s != "packed:2"]

    def _compare(self, options: TrainOptions, out: Path) -> RunSummary:
        base = self._profile(self.measured.link, options.budget_tokens, Overlap())
        rate, what = None, f"{self.size} ranks, loopback as it is"
        profile = base
        if self.size > 1 and options.scale_model != "none":
            ratio = SCALE_RATIO[options.scale_model]
            rate = 1e6 / paced_us_per_byte(base, ratio)
            what = f"{self.size} ranks, scale model {options.scale_model}"
        elif self.size > 1 and options.link_mbytes_per_s is not None:
            rate = options.link_mbytes_per_s * 1e6
            what = f"{self.size} ranks, link of {options.link_mbytes_per_s:g} MB/s"
        if rate is not None:
            # A paced message takes the pacer's time or the loopback's, whichever is longer.
            per_byte = max(1e6 / rate, self.measured.link[0])
            link = (per_byte, self.measured.link[1])
            profile = self._profile(link, options.budget_tokens, Overlap())
            profile = replace(profile, overlap=self._overlap(profile, rate))
        self.say(f"{what}: {', '.join(self._strategies())}")
        return compare(
            options, out=out, what=what, strategies=self._strategies(), corpus=self.corpus,
            model=self.model, profile=profile, link_bytes_per_s=rate, say=self.say,
        )  # fmt: skip

    def _virtual(self, ranks: int, ranks_per_node: int, out: Path) -> RunSummary:
        base = self._profile(self.measured.link, VIRTUAL_MEMORY_TOKENS, Overlap())
        return virtual_run(
            ranks=ranks, ranks_per_node=ranks_per_node, samples=4 * ranks,
            repeats=min(self.options.repeats, 3), seed=self.options.seed,
            strategies=["packed", "static", "dcp"], corpus=self.corpus, model=self.model,
            profile=base, node_us_per_byte=paced_us_per_byte(base, SCALE_RATIO["7b-node"]),
            cross_us_per_byte=paced_us_per_byte(base, SCALE_RATIO["7b-cross-node"]),
            out=out, say=self.say,
        )  # fmt: skip

    def _show(self, out: Path, summary: RunSummary) -> None:
        if self.rank == 0:
            obj = summary.to_object()
            print(f"\n{obj['what']}  ({out}/summary.json)")
            print("\n".join(table_lines(obj)), flush=True)


def _of_rank_0(profile: CostProfile) -> CostProfile:
    """All ranks plan with the same profile: rank 0's."""
    import json

    world = DataWorld()
    text = gather_bytes(world, dumps(profile).encode())[0]
    world.close()
    return from_object(json.loads(text))
