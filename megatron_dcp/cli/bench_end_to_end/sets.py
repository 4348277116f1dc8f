"""The data sets of the benchmark: real text, in its own lengths or cut to those of other data.

A cluster trains on samples of 128K tokens and more; on one core the longest is --max-length, and
the other lengths shrink with it, so that how the work is spread over samples stays the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from megatron_dcp.data.generators import generate
from megatron_dcp.data.stdlib import TextCorpus, stdlib_corpus

CONTEXT_TOKENS = 128 * 1024  # of the cluster that `heavy` stands for
LONGEST_VIDEO_TOKENS = 432_000  # 720p, 408 frames
STEPS = 32  # global batches of 2 ranks in a generated set; more are drawn again


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSet:
    """per_rank: samples of a global batch for each rank; of virtual ranks half as many, because
    all of them are run by one or two cores. about: one line for the table."""

    corpus: TextCorpus
    per_rank: int
    about: str

    @property
    def per_virtual_rank(self) -> int:
        return max(1, self.per_rank // 2)


@cache
def _stdlib() -> TextCorpus:
    return stdlib_corpus()


def sample_set(name: str, *, max_length: int, seed: int) -> SampleSet:
    """A set by its name. Batches hold about 8000 tokens per rank at the default length."""
    text = _stdlib()
    if name == "stdlib":
        corpus = text.clip(max_length)
        return SampleSet(
            corpus=corpus, per_rank=8,
            about=f"definitions of the standard library, {corpus.clipped} cut to {max_length}",
        )  # fmt: skip
    if name == "heavy":
        scale, per_rank = CONTEXT_TOKENS / max_length, 20
        drawn = generate("github-like", per_rank * 64 * STEPS, seed).lengths
        lengths = [min(max_length, max(2, round(n / scale))) for n in drawn]
        about = f"lognormal(7.5, 1.7) cut to 128K tokens, all divided by {scale:g}"
    else:
        assert name == "video-balanced"
        scale, per_rank = LONGEST_VIDEO_TOKENS / max_length, 128
        drawn = generate("video-balanced", per_rank * 64 * STEPS, seed).lengths
        lengths = [max(2, round(n / scale)) for n in drawn]
        about = f"lengths of preset video-balanced divided by {scale:g}, as causal text"
    return SampleSet(corpus=text_of(text, lengths, name), per_rank=per_rank, about=about)


def text_of(source: TextCorpus, lengths: Sequence[int], name: str) -> TextCorpus:
    """The text of a corpus, one sample after the other, cut anew to the given lengths."""
    whole = b"\n".join(source.samples)
    samples, at = [], 0
    for n in lengths:
        if at + n > len(whole):
            at = 0
        samples.append(whole[at : at + n])
        at += n
    return TextCorpus(name=name, samples=tuple(samples))
