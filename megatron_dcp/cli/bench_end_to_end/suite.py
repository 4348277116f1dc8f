"""The runs of the benchmark, on every rank: one stack, one calibration, then comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_dcp.cli.bench_end_to_end.options import NO_BUDGET, SETTINGS, EndToEndOptions
from megatron_dcp.cli.bench_end_to_end.sets import SampleSet, sample_set
from megatron_dcp.cli.bench_end_to_end.trainers import Job, Settings, Trainer, open_trainer
from megatron_dcp.cli.train.interleave import Repeats, interleave
from megatron_dcp.cli.train.process import Progress
from megatron_dcp.cli.train.stack import Linked, Stack
from megatron_dcp.cli.train.virtual import Cluster, scale_links, virtual_run
from megatron_dcp.cost import Link
from megatron_dcp.cost.derive import profile as analytic
from megatron_dcp.dist import DataWorld, PlacementContext
from megatron_dcp.observe.summary import RunSummary
from megatron_dcp.plan import Topology
from megatron_dcp.runtime.engine import node_ranks

# Ranks of one node of a virtual cluster.
NODE_RANKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One finished comparison. folder: inside the output folder."""

    setting: str
    data: str
    folder: str
    summary: RunSummary


class Suite:
    """options: as asked, --quick applied."""

    def __init__(self, options: EndToEndOptions) -> None:
        self.options, self.say = options, Progress()
        settings = Settings(
            max_length=options.max_length, seed=options.seed, model=options.model,
            device=options.device, say=self.say,
        )  # fmt: skip
        self.trainer: Trainer = open_trainer(options.trainer, settings)
        self.stack: Stack = self.trainer.stack()
        names = options.strategy_names or list(self.trainer.strategies)
        self.strategies = names if self.stack.size == 2 else virtual_names(names)

    def run(self) -> list[Run]:
        o = self.options
        sets = {n: sample_set(n, max_length=o.max_length, seed=o.seed) for n in o.set_names}
        runs = []
        for setting in o.setting_names:
            linked = self._linked(setting)
            for name, data in sets.items():
                runs.append(self._compare(setting, linked, name, data))
        for ranks in o.clusters:
            for name, data in sets.items():
                runs.append(self._virtual(ranks, name, data))
        return runs

    def _linked(self, setting: str) -> Linked:
        scale = SETTINGS[setting.removesuffix(NO_BUDGET)]
        linked = self.stack.linked(scale, self.options.budget_tokens(setting))
        if setting.startswith("network") and self.options.hardware is not None:
            node = node_ranks(None, self.stack.size)
            links = self._links(Topology(data_ranks=self.stack.size, ranks_per_node=node))
            linked = replace(linked, profile=replace(linked.profile, links=links))
        return linked

    def _links(self, topology: Topology) -> tuple[Link, ...]:
        """Of the hardware preset; the model named there does not matter to them."""
        assert self.options.hardware is not None
        return analytic(self.options.hardware, "gpt-1m", topology).links

    def _compare(self, setting: str, linked: Linked, name: str, data: SampleSet) -> Run:
        o, world = self.options, DataWorld(device=self.stack.device)
        job = Job(
            world=world, corpus=data.corpus, linked=linked, seed=o.seed, lr=o.lr,
            global_batch=data.per_rank * self.stack.size,
        )  # fmt: skip
        what = f"{name}, {setting}: {o.trainer} trainer ({self.trainer.package}), {linked.what}"
        self.say(f"{what}: {', '.join(self.strategies)}")
        contenders = [self.trainer.contender(s, job) for s in self.strategies]
        folder = f"{o.trainer}-{setting}-{name}"
        link = linked.bytes_per_s
        summary = interleave(
            contenders, Repeats(repeats=o.repeats, memory=True, draw=("dcp",)), world=world,
            profile=linked.profile, out=o.out / folder, what=what, say=self.say,
            config={
                "ranks": self.stack.size, "global_batch": job.global_batch, "data": data.about,
                "max_length": o.max_length, "seed": o.seed, "repeats": o.repeats,
                "memory_tokens": o.budget_tokens(setting),
                "link_mbytes_per_s": None if link is None else round(link / 1e6, 3),
            },
        )  # fmt: skip
        for contender in contenders:
            contender.close()
        world.close()
        # Goals are stated for the native trainer.
        kind = setting if o.native else f"{o.trainer} {setting}"
        return Run(setting=kind, data=name, folder=folder, summary=summary)

    def _virtual(self, ranks: int, name: str, data: SampleSet) -> Run:
        o = self.options
        cluster = Cluster(
            ranks=ranks, ranks_per_node=min(NODE_RANKS, ranks // 2),
            samples=data.per_virtual_rank * ranks, repeats=o.virtual_repeats, seed=o.seed,
        )  # fmt: skip
        profile = self.stack.profile(o.virtual_memory_tokens)
        links = scale_links(profile, cluster)
        if o.hardware is not None:
            links = self._links(cluster.topology)
        folder = f"virtual{ranks}-{name}"
        summary = virtual_run(
            cluster, strategies=virtual_names(self.strategies), corpus=data.corpus,
            run=self._run_pack, profile=replace(profile, links=links), out=o.out / folder,
            say=self.say, device=self.stack.device, title=f"{name}, ", draw=("dcp",),
        )  # fmt: skip
        return Run(setting=f"virtual{ranks}", data=name, folder=folder, summary=summary)

    def _run_pack(self, context: PlacementContext) -> None:
        self.stack.run(context, context.placement.recompute)


def virtual_names(strategies: Sequence[str]) -> list[str]:
    """`packed:2` is two ranks' only useful pack; more ranks take the degree of the longest."""
    return ["packed" if s == "packed:2" else s for s in strategies]


def run_suite(options: EndToEndOptions) -> list[Run]:
    """Collective: every rank calls it alike."""
    return Suite(options).run()
