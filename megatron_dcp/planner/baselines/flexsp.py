"""`flexsp`: heterogeneous sequence-parallel groups chosen by a mixed-integer program.

Source: Wang et al., "FlexSP: Accelerating Large Language Model Training via Flexible Sequence
Parallelism" (ASPLOS 2025). The batch is cut into microbatches: samples sorted by length,
consecutive ones together, tokens balanced; for each, a program (`flexsp_milp`) picks the groups of
ranks and the number of samples of each length class in each group so that the slowest group is as
fast as can be. The least number of microbatches that memory allows, and one more, are tried; the
faster plan wins.

No recomputation, as in the paper, but for a sample that does not fit without it: it runs alone on
the fewest ranks on which it fits at all, after the others. `flexsp:SECONDS` is the time of the
solver for the whole step (10 without it); HiGHS starts from a greedy assignment and keeps the best
found. A time limit makes plans depend on the machine: the plan is made once and its bytes are sent
to the other ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from megatron_dcp.errors import ConfigError
from megatron_dcp.planner.baselines.flexsp_milp import Microbatch
from megatron_dcp.planner.packing import best_of, degree_ladder
from megatron_dcp.planner.pricing import Pricer, place_slots
from megatron_dcp.planner.registry import Draft, PlanRequest
from megatron_dcp.planner.waves import Group, WaveLayout

SECONDS = 10.0
MORE_MICROBATCHES = 1


def flexsp(request: PlanRequest, parameter: str | None) -> Draft:
    """`flexsp` or `flexsp:SECONDS`. Raises PlanError when a sample fits no degree."""
    seconds = _parse_seconds(parameter) if parameter is not None else SECONDS
    pricer = Pricer(request)
    lengths, ladder = request.workload.lengths, degree_ladder(request.topology)
    most = max(pricer.capacity(d) for d in ladder)
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    oversize = [oversize_group(pricer, i) for i in order if lengths[i] > most]
    regular = [i for i in order if lengths[i] <= most]
    tokens = sum(lengths[i] for i in regular)
    per_step = max(1, max(pricer.capacity(d) * (request.topology.data_ranks // d) for d in ladder))
    least = max(1, math.ceil(tokens / per_step))
    counts = range(least, least + 1 + MORE_MICROBATCHES)
    todo = sum(counts)
    deadline = time.monotonic() + seconds
    drafts = []
    for count in counts:
        layout = WaveLayout(pricer)
        for chunk in chunks_of(lengths, regular, count):
            share = max(0.0, deadline - time.monotonic()) / max(1, todo)
            for wave in solve_chunk(pricer, chunk, share):
                layout.add(wave)
            todo -= 1
        for group in oversize:
            layout.add([group])
        drafts.append((f"flexsp {count} microbatches", place_slots(pricer, layout.slots)))
    name, placements = best_of(request, drafts)
    return Draft(placements=placements, algorithm=name)


def _parse_seconds(parameter: str) -> float:
    try:
        seconds = float(parameter)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigError(f"strategy flexsp:{parameter}: the time limit is a number of seconds > 0")
    return seconds


def oversize_group(pricer: Pricer, sample: int) -> Group:
    """A sample that needs recomputation: alone, on the degree on which it is fastest."""
    ladder = degree_ladder(pricer.topology)
    prices = [(p.time_us, d) for d in ladder if (p := pricer.sample_price(sample, d)) is not None]
    if not prices:
        raise pricer.cannot_fit(sample, ladder, "on every degree of flexsp")
    return Group(min(prices)[1], (sample,))


def chunks_of(lengths: Sequence[int], ordered: Sequence[int], count: int) -> list[list[int]]:
    """At most `count` runs of consecutive samples whose largest token sum is as small as can be."""
    if not ordered:
        return []
    low, high = max(lengths[i] for i in ordered), sum(lengths[i] for i in ordered)
    while low < high:
        middle = (low + high) // 2
        if len(_runs(lengths, ordered, middle)) <= count:
            high = middle
        else:
            low = middle + 1
    return _runs(lengths, ordered, low)


def _runs(lengths: Sequence[int], ordered: Sequence[int], most: int) -> list[list[int]]:
    runs: list[list[int]] = []
    held = most + 1
    for i in ordered:
        if held + lengths[i] > most:
            runs.append([])
            held = 0
        runs[-1].append(i)
        held += lengths[i]
    return runs


def solve_chunk(pricer: Pricer, samples: Sequence[int], seconds: float) -> list[list[Group]]:
    """The waves of one microbatch: one, or more where its samples do not fit together."""
    program = Microbatch(pricer, samples)
    found = program.solve(seconds)
    if found is None:
        assert len(samples) > 1  # one sample fits: it is no longer than the largest capacity
        half = len(samples) // 2
        parts = (samples[:half], samples[half:])
        return [wave for part in parts for wave in solve_chunk(pricer, part, seconds / 2)]
    left = [list(c.samples) for c in program.classes]
    wave = []
    for degree, counts in found.groups:
        held = [left[q].pop(0) for q, n in enumerate(counts) for _ in range(n)]
        wave.append(Group(degree, tuple(held)))
    return [wave]
