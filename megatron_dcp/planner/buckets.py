"""Buckets of samples that have the same shape, or, for text, almost the same length.

A bucket of video is one shape (frames, height, width). Text lengths are continuous, so a bucket of
text is one octave, lengths of (2^(k-1), 2^k]: the customary power-of-two bins. A bucket is only a
class: packed attention needs no padding, every time and byte is that of the true lengths.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron_dcp.plan import Workload


def buckets_of(workload: Workload, samples: Iterable[int] | None = None) -> list[list[int]]:
    """Samples of each bucket, longest first; buckets in falling order of their longest sample."""
    lengths, shapes = workload.lengths, workload.shapes
    held: dict[tuple[int, ...], list[int]] = {}
    for i in range(len(lengths)) if samples is None else samples:
        key = ((lengths[i] - 1).bit_length(),) if shapes is None else shapes[i]
        held.setdefault(key, []).append(i)
    for members in held.values():
        members.sort(key=lambda i: (-lengths[i], i))
    return sorted(held.values(), key=lambda members: (-lengths[members[0]], members[0]))


def batches_of(lengths: tuple[int, ...], bucket: list[int], tokens: int) -> list[list[int]]:
    """A bucket cut into batches of at most `tokens` tokens, longest samples first.

    A batch holds at least one sample, however long.
    """
    batches: list[list[int]] = []
    held = 0
    for i in bucket:
        if not batches or held + lengths[i] > tokens:
            batches.append([])
            held = 0
        batches[-1].append(i)
        held += lengths[i]
    return batches
