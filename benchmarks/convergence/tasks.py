"""The three trainings of the convergence runs: their data, model, loss and cost profile.

    gpt-stdlib   a GPT on every definition of the running interpreter's standard library
    gpt-man      a GPT on the sections of this system's manual pages (roff text, sections 2 to 8)
    dit-clips    the 2-D video diffusion transformer of examples/video_dit on its rendered clips

Models are tiny so that 200 steps take seconds. The memory budget holds a part of the longest sample
only, so that plans need degree 2 or recomputation and strategies really differ.
"""

from __future__ import annotations

import gzip
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_dcp.cli.train.model import Gpt, GptConfig
from megatron_dcp.cost import CostProfile
from megatron_dcp.cost.derive import profile
from megatron_dcp.cost.models import ModelSpec
from megatron_dcp.data.stdlib import TextCorpus, stdlib_corpus
from megatron_dcp.errors import ConfigError
from megatron_dcp.plan import Topology
from megatron_dcp.runtime.autocost import model_spec

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "video_dit"))
from clips import RenderedClips
from dit import DitConfig, VideoDit, flow_loss_sum

MANUAL = Path("/usr/share/man")
SECTION = re.compile(rb"^\.S[Hh]\b", re.M)
MOST_PAGES = 1500


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """dataset(dtype); model(dtype); loss_sum(model, microbatch, seed) over local tokens.

    loader: options of `engine.dataloader` beside the batch. budget_tokens: what one rank holds
    without recomputation.
    """

    what: str
    dataset: Callable[[torch.dtype], Any]
    model: Callable[[], nn.Module]
    loss_sum: Callable[[nn.Module, Any, int], Tensor]
    spec: ModelSpec
    budget_tokens: int
    batch: int
    lr: float
    loader: dict[str, Any] = field(default_factory=dict)


@cache
def manual_pages(root: Path = MANUAL, most: int = MOST_PAGES) -> TextCorpus:
    """Sections of manual pages as byte tokens, evenly taken from at most `most` pages."""
    pages = sorted(p for n in range(2, 9) for p in root.glob(f"man{n}/*.gz") if not p.is_symlink())
    if not pages:
        raise ConfigError(
            f"no manual pages below {root}; install some (Debian: apt-get install manpages-dev), "
            "or leave the task gpt-man out"
        )
    samples: list[bytes] = []
    for page in pages[:: -(-len(pages) // most)]:
        text = gzip.decompress(page.read_bytes())
        starts = [m.start() for m in SECTION.finditer(text)]
        samples += [text[a:b].strip() for a, b in pairwise([*starts, len(text)])]
    return TextCorpus(name="manual pages", samples=tuple(s for s in samples if len(s) > 16))


GPT = GptConfig(hidden=32, layers=2, heads=2, kv_heads=1, ffn=96)
DIT = DitConfig(grid="2d", hidden=48, layers=4, heads=4, ffn=96)
LONGEST = 320


def _gpt_loss(model: nn.Module, mb: Any, seed: int) -> Tensor:
    logits = model(**mb.inputs)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, mb.labels, ignore_index=-100, reduction="sum")


def _dit_loss(model: nn.Module, mb: Any, seed: int) -> Tensor:
    return flow_loss_sum(model, mb.inputs, mb.weights, seed=seed)


def _gpt(what: str, corpus: Callable[[], TextCorpus]) -> Task:
    spec = ModelSpec(
        name="tiny-gpt", source="benchmarks/convergence", pairs="causal", layers=GPT.layers,
        hidden=GPT.hidden, heads=GPT.heads, kv_heads=GPT.kv_heads, head_dim=GPT.head_dim,
        ffn=GPT.ffn, mlp_matrices=3, vocab=GPT.vocab,
    )  # fmt: skip
    return Task(
        what=what, dataset=lambda dtype: corpus().clip(LONGEST), model=lambda: Gpt(GPT),
        loss_sum=_gpt_loss, spec=spec, budget_tokens=208, batch=6, lr=2e-3,
    )  # fmt: skip


def _dit() -> Task:
    return Task(
        what="2-D video DiT on rendered clips",
        dataset=lambda dtype: RenderedClips(2000, shrink=6, images_per_video=1.0, dtype=dtype),
        model=lambda: VideoDit(DIT),
        loss_sum=_dit_loss,
        spec=model_spec(VideoDit(DIT)),
        budget_tokens=320,
        batch=16,
        lr=2e-3,
        loader={"shapes": "shapes", "per_sample": ["caption"], "shift_labels": False},
    )


TASKS: dict[str, Task] = {
    "gpt-stdlib": _gpt("GPT on standard-library definitions", cache(stdlib_corpus)),
    "gpt-man": _gpt("GPT on manual-page sections", manual_pages),
    "dit-clips": _dit(),
}


def cost_profile(task: Task, ranks: int) -> CostProfile:
    """The analytic profile of the task's model on CPU cores, with the task's memory budget."""
    topology = Topology(data_ranks=ranks, ranks_per_node=ranks)
    found = profile("cpu-2core", task.spec, topology)
    per_token = found.kept_bytes_per_token_layer * task.spec.layers
    per_token += found.working_bytes_per_token + found.head_bytes_per_token
    return replace(
        found, name=f"convergence-{task.spec.name}",
        budget_bytes=int(found.static_bytes + per_token * task.budget_tokens),
    )  # fmt: skip


def named(names: Sequence[str]) -> list[str]:
    """Task names, checked."""
    unknown = [n for n in names if n not in TASKS]
    if unknown:
        raise ConfigError(f"unknown tasks {unknown}; known are {', '.join(TASKS)}")
    return list(names)
