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

from megatron_dcp.planner.packing import (
    Slots,
    best_degree,
    blocks_of,
    deal,
    first_fit_decreasing,
    lpt,
    sample_weights,
    stack_blocks,
)
from megatron_dcp.planner.pricing import Pricer
from megatron_dcp.planner.registry import Draft, PlanRequest


def static(request: PlanRequest, parameter: str | None) -> Draft:
    """`static` or `static:D`. Raises PlanError when the longest sample fits no degree."""
    return best_degree(request, "static", parameter, candidates)


def candidates(pricer: Pricer, degree: int) -> Iterator[Slots]:
    """Slots of one degree: balanced by time; in lockstep also dealt slot by slot."""
    lengths, topology = pricer.request.workload.lengths, pricer.topology
    blocks = blocks_of(topology, degree)
    cap = pricer.capacity(degree)
    bins = lpt(sample_weights(pricer, degree), [topology.block_speed(b, degree) for b in blocks])
    yield stack_blocks(
        pricer,
        degree,
        [(b, first_fit_decreasing(lengths, s, cap)) for b, s in zip(blocks, bins, strict=True)],
    )
    if pricer.request.lockstep > 1:
        yield deal(pricer, degree, first_fit_decreasing(lengths, range(len(lengths)), cap))
