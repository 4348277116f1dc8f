"""The reference trainer's runs: one comparison, or the quickstart suite of them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import tyro

from megatron_dcp.cli.outputs import check_folder
from megatron_dcp.cli.train.compare import gpt_stack, native_contender
from megatron_dcp.cli.train.fused import find_fused
from megatron_dcp.cli.train.interleave import Repeats, interleave
from megatron_dcp.cli.train.long import train_long
from megatron_dcp.cli.train.model import Gpt, GptConfig
from megatron_dcp.cli.train.options import TrainOptions
from megatron_dcp.cli.train.process import Progress, data_ranks
from megatron_dcp.cli.train.stack import Linked
from megatron_dcp.cli.train.virtual import Cluster, run_pack, scale_links, virtual_run
from megatron_dcp.cost import load
from megatron_dcp.data.stdlib import TextCorpus, stdlib_corpus
from megatron_dcp.dist import DataWorld
from megatron_dcp.observe.summary import RunSummary, table_lines
from megatron_dcp.plan import Topology
from megatron_dcp.planner import check_strategy
from megatron_dcp.runtime.recompute import wrap_layers

# (ranks, ranks per node) of the virtual clusters. The longest sample (8192 tokens) needs 8 ranks of
# 1024 tokens without recompute, as a 128K context does on ranks that hold 16K.
VIRTUAL = ((8, 4), (32, 8))
VIRTUAL_MEMORY_TOKENS = 1024


def main(argv: list[str]) -> int:
    options = tyro.cli(TrainOptions, args=argv, prog="mdcp train")
    check_folder(options.out)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    topology = Topology(data_ranks=ranks, ranks_per_node=options.ranks_per_node or ranks)
    for strategy in options.strategies_on(ranks):
        check_strategy(strategy, topology)
    if options.cost is not None:
        load(options.cost)  # refused before the corpus is read
    with data_ranks():
        return _Trainer(options).run()


class _Trainer:
    """Holds what all runs of one process share: corpus, initial model, calibration."""

    def __init__(self, options: TrainOptions) -> None:
        self.options, self.say = options, Progress()
        self.corpus = self._corpus()
        torch.manual_seed(options.seed)
        self.model = Gpt(GptConfig())
        self.fused = find_fused(options.fused, next(self.model.parameters()).device)
        self.fused.replace_norms(self.model)
        for line in self.fused.lines:
            self.say(line)
        wrap_layers(self.model.layers)
        self.stack = gpt_stack(self.model, max_length=options.max_length, say=self.say)

    def _corpus(self) -> TextCorpus:
        whole = stdlib_corpus()
        corpus = whole.clip(self.options.max_length)
        self.say(
            f"{len(whole)} definitions of the standard library, {sum(whole.lengths)} byte tokens, "
            f"longest {max(whole.lengths)}; {corpus.clipped} cut to {self.options.max_length} "
            f"tokens ({corpus.cut_tokens} tokens left out)"
        )
        return corpus

    def run(self) -> int:
        """Exit status: 0, or `STOP_STATUS` when preempted after a checkpoint."""
        if self.options.train_steps is not None:
            return train_long(
                self.options, corpus=self.corpus, model=self.model, say=self.say,
                fitted=lambda: self.stack.profile(self.options.budget_tokens), fused=self.fused,
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
        return self.options.strategies_on(self.stack.size)

    def _compare(self, options: TrainOptions, out: Path) -> RunSummary:
        linked = self.stack.linked(
            options.scale_model, options.budget_tokens, mbytes_per_s=options.link_mbytes_per_s
        )
        self.say(f"{linked.what}: {', '.join(self._strategies())}")
        world = DataWorld()
        contenders = [
            native_contender(
                s, world=world, model=self.model, corpus=self.corpus, linked=linked,
                global_batch=options.global_batch, seed=options.seed, lr=options.lr,
                ranks_per_node=options.ranks_per_node, shape_quantum=options.shape_quantum,
                fused=self.fused,
            )
            for s in self._strategies()
        ]  # fmt: skip
        summary = interleave(
            contenders, Repeats(repeats=options.repeats, steps=options.steps), world=world,
            profile=linked.profile, out=out, what=linked.what,
            config=self._config(options, linked), say=self.say,
        )  # fmt: skip
        for contender in contenders:
            contender.close()
        world.close()
        return summary

    def _config(self, options: TrainOptions, linked: Linked) -> dict[str, Any]:
        link = linked.bytes_per_s
        return {
            "ranks": self.stack.size,
            "global_batch": options.global_batch,
            "max_length": options.max_length,
            "clipped_samples": self.corpus.clipped,
            "seed": options.seed,
            "repeats": options.repeats,
            "steps_per_repeat": options.steps,
            "scale_model": options.scale_model,
            "link_mbytes_per_s": None if link is None else round(link / 1e6, 3),
            "memory_tokens": options.budget_tokens,
            "corpus": self.corpus.name,
        }

    def _virtual(self, ranks: int, ranks_per_node: int, out: Path) -> RunSummary:
        cluster = Cluster(
            ranks=ranks, ranks_per_node=ranks_per_node, samples=4 * ranks,
            repeats=min(self.options.repeats, 3), seed=self.options.seed,
        )  # fmt: skip
        profile = self.stack.profile(VIRTUAL_MEMORY_TOKENS)
        profile = replace(profile, links=scale_links(profile, cluster))
        return virtual_run(
            cluster, strategies=["packed", "static", "dcp"], corpus=self.corpus,
            run=lambda c: run_pack(self.model, c), profile=profile, out=out, say=self.say,
        )  # fmt: skip

    def _show(self, out: Path, summary: RunSummary) -> None:
        if self.stack.rank == 0:
            obj = summary.to_object()
            print(f"\n{obj['what']}  ({out}/summary.json)")
            print("\n".join(table_lines(obj)), flush=True)
