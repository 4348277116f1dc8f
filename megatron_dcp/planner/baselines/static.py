"""`static`: the best single degree for the whole batch.

Source: the customary setting, one SP/CP degree for the run, made as strong as it can be: the degree
is chosen anew for each batch, samples are balanced by predicted time, packs are filled to the cap.

For each degree of the ladder (powers of two): LPT of the samples by predicted time, without the
overhead that a microbatch pays once, onto the N/d blocks; first-fit decreasing inside a block to
the tokens that fit without recompute; a longer sample alone, with the least recompute that fits.
Lockstep (more than one rank per domain) also tries the packs of the whole batch, longest first,
dealt to the blocks slot by slot, which makes the slots equal. The plan with the smallest makespan
wins; ties go to the smaller degree.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_dcp.plan import Placement
from megatron_dcp.planner.packing import (
    blocks_of,
    degree_ladder,
    first_fit_decreasing,
    fixed_degree,
    lpt,
    stack_blocks,
)
from megatron_dcp.planner.pricing import Pricer, Share, place_slots, replayed_us
from megatron_dcp.planner.registry import Draft, PlanRequest


def static(request: PlanRequest, parameter: str | None) -> Draft:
    """`static` or `static:D`. Raises PlanError when the longest sample fits no degree."""
    pricer = Pricer(request)
    if parameter is not None:
        degrees = [fixed_degree(pricer, "static", parameter)]
    else:
        ladder, longest = degree_ladder(request.topology), pricer.longest()
        degrees = [d for d in ladder if pricer.sample_price(longest, d) is not None]
        if not degrees:
            raise pricer.cannot_fit(longest, ladder, "on every static degree")
    best: tuple[int, int, list[Placement]] | None = None
    for degree in degrees:
        for slots in candidates(pricer, degree):
            placements = place_slots(pricer, slots)
            span = replayed_us(request, placements)
            if best is None or span < best[0]:
                best = (span, degree, placements)
    assert best is not None
    return Draft(placements=best[2], algorithm=f"static degree {best[1]}")


def candidates(pricer: Pricer, degree: int) -> Iterator[list[list[Share]]]:
    """Slots of one degree: balanced by time; in lockstep also dealt slot by slot."""
    request = pricer.request
    lengths, topology = request.workload.lengths, request.topology
    blocks = blocks_of(topology, degree)
    cap = pricer.capacity(degree)
    # A pack pays the overhead once, so a sample's share of it is no weight of its own.
    overhead = pricer.overhead_us
    weights = []
    for i in range(len(lengths)):
        price = pricer.sample_price(i, degree)
        if price is None:
            raise pricer.cannot_fit(i, [degree], f"on {degree} ranks")
        weights.append(price.time_us - overhead)
    bins = lpt(weights, [topology.block_speed(b, degree) for b in blocks])
    yield stack_blocks(
        pricer,
        degree,
        [(b, first_fit_decreasing(lengths, s, cap)) for b, s in zip(blocks, bins, strict=True)],
    )
    if request.lockstep > 1:
        yield deal(pricer, degree, first_fit_decreasing(lengths, range(len(lengths)), cap))


def deal(pricer: Pricer, degree: int, packs: list[list[int]]) -> list[list[Share]]:
    """Packs, longest time first, dealt to the blocks slot by slot."""
    blocks = blocks_of(pricer.topology, degree)
    timed = []
    for samples in packs:
        price = pricer.price(pricer.pack_of(samples), degree)
        timed.append((0 if price is None else -price.time_us, min(samples), tuple(samples)))
    ordered = [samples for _, _, samples in sorted(timed)]
    return [
        [
            Share(block, degree, samples)
            for block, samples in zip(blocks, ordered[k : k + len(blocks)], strict=False)
        ]
        for k in range(0, len(ordered), len(blocks))
    ]
