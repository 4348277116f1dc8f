"""Options of `mdcp train`, and the scale models of a cluster."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_dcp.errors import ConfigError
from megatron_dcp.observe.sinks import check_sinks

ScaleModel = Literal["none", "7b-node", "7b-cross-node"]

# Communication : linear compute per token of a degree-2 placement of a 7B model on A100, from the
# preset a100-gpt7b: 2 ranks of one node (119.5 GB/s) give 0.095, two nodes (10.33 GB/s) 1.10.
SCALE_RATIO: dict[str, float] = {"7b-node": 0.1, "7b-cross-node": 1.1}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """Train the reference GPT on real variable-length text under several strategies.

    The same samples, seed and initial weights for every strategy; repeats are interleaved
    (A B C A B C ...). Run it under torchrun; one process alone works too. Ranks run on cores
    (gloo), also where there are GPUs.
    """

    out: Path = Path("runs/train")
    """Directory for summary.json, plans/, events-rank*.jsonl and timeline.png."""

    suite: Literal["one", "virtual", "quickstart"] = "one"
    """`one`: one comparison. `virtual`: 8- and 32-rank plans replayed with measured compute.
    `quickstart`: unpaced, across-node scale model and virtual ranks, each in a folder of OUT."""

    strategies: str = "packed:2,static,dcp"
    """Comma-separated; on a single rank packed:2 is left out."""

    max_length: int = 8192
    """Longer samples are cut to this many tokens; how many were is printed."""

    shape_quantum: int = 0
    """Pad every sample to a multiple of so many tokens (torch.compile: fewer shapes); 0: off."""

    global_batch: int = 16
    """Samples per optimizer step."""

    steps: int = 1
    """Optimizer steps of each strategy in each repeat."""

    repeats: int = 5
    """Interleaved repeats over the strategies."""

    seed: int = 0
    lr: float = 1e-3

    fused: Literal["auto", "off"] = "off"
    """`auto`: fused AdamW and norms of apex or Transformer Engine where they run, else torch's own
    fused AdamW; what is used, and why the rest is not, is printed."""

    ranks_per_node: int | None = None
    """Ranks per node of the plan's topology (default: all ranks in one node)."""

    scale_model: ScaleModel = "none"
    """Pace what each rank sends so that communication : compute is that of a 7B model."""

    link_mbytes_per_s: float | None = None
    """Pace what each rank sends to this rate instead of a scale model's."""

    memory_tokens: int | None = None
    """Budget: tokens that one rank holds without recompute (default: 4096 with a scale model, else
    no limit; 0: no limit)."""

    virtual: bool = True
    """quickstart: replay 8- and 32-rank plans on one core."""

    train_steps: int | None = None
    """Instead of a comparison: train the last of --strategies for so many steps, with checkpoints
    in OUT/checkpoints and one line per step in OUT/steps.jsonl."""

    checkpoint_every: int = 10
    """Steps between checkpoints of --train-steps; the last step always writes one."""

    resume: bool = False
    """Go on from the newest checkpoint of OUT, where there is one (--train-steps)."""

    allow_previous: bool = False
    """If the newest checkpoint is damaged, take the one before and repeat the steps since."""

    cost: Path | None = None
    """Plan with this cost profile instead of fitting one (--train-steps)."""

    metrics: str = ""
    """Comma-separated: console, tensorboard, wandb (offline). Measures every step of --train-steps
    and leaves what `mdcp report OUT` needs."""

    metrics_every: int = 10
    """Steps between two tables of --metrics console."""

    refit: bool = False
    """Let measured microbatches correct the cost profile; a correction is adopted only when a
    checkpoint is written, as a new version OUT/cost-DIGEST.json (--train-steps)."""

    dry_run: bool = True
    """Before training run the heaviest step that the data can give, and forget it: what would run
    out of memory hours later does so now (--train-steps)."""

    watchdog_s: float = 300.0
    """A rank that waits longer than this inside a step ends the job and says for whom."""

    def __post_init__(self) -> None:
        for name in ("max_length", "global_batch", "steps", "repeats", "checkpoint_every",
                     "metrics_every"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1")
        if self.shape_quantum < 0:
            raise ConfigError(f"--shape-quantum is {self.shape_quantum}; use at least 0")
        if self.shape_quantum and self.suite != "one":
            raise ConfigError("--shape-quantum belongs to --suite one")
        if self.train_steps is not None and self.train_steps < 1:
            raise ConfigError("--train-steps must be at least 1")
        given = (self.resume, self.allow_previous, self.cost, self.metrics, self.refit)
        if any(given) and self.train_steps is None:
            raise ConfigError(
                "--resume, --allow-previous, --cost, --metrics and --refit belong to "
                "--train-steps; pass it too"
            )
        check_sinks(self.metric_sinks)
        if not 0 < self.lr < math.inf:
            raise ConfigError(f"--lr is {self.lr}; use a number above 0")
        if not self.watchdog_s > 0:
            raise ConfigError(f"--watchdog-s is {self.watchdog_s}; use a number above 0")
        if self.seed < 0 or (self.memory_tokens or 0) < 0:
            raise ConfigError("--seed and --memory-tokens must be at least 0")
        if self.link_mbytes_per_s is not None and self.scale_model != "none":
            raise ConfigError("--link-mbytes-per-s and --scale-model both set the link; pass one")
        rate = self.link_mbytes_per_s
        if rate is not None and not 0 < rate < math.inf:
            raise ConfigError(f"--link-mbytes-per-s is {rate}; use a number above 0")
        if self.ranks_per_node is not None and self.ranks_per_node < 1:
            raise ConfigError(f"--ranks-per-node is {self.ranks_per_node}; use at least 1")

    @property
    def strategy_names(self) -> list[str]:
        return [s.strip() for s in self.strategies.split(",") if s.strip()]

    @property
    def metric_sinks(self) -> list[str]:
        return [s.strip() for s in self.metrics.split(",") if s.strip()]

    @property
    def measured(self) -> bool:
        """Whether a long run measures its steps."""
        return bool(self.metrics) or self.refit

    def strategies_on(self, ranks: int) -> list[str]:
        """What can run there: a single rank leaves packed:2 out. ConfigError where none is left."""
        found = [s for s in self.strategy_names if ranks > 1 or s != "packed:2"]
        if not found:
            raise ConfigError(
                f"--strategies {self.strategies!r} names none that runs on {ranks} ranks"
            )
        return found

    @property
    def budget_tokens(self) -> int | None:
        """Tokens per rank, or None for no limit."""
        if self.memory_tokens is not None:
            return self.memory_tokens or None
        return 4096 if self.scale_model != "none" else None
