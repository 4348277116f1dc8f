"""The invariants of a plan, always on; each is one function of the name it has in DESIGN.md.

`check_plan` runs them all and raises PlanError with the name of the first that is broken and its
smallest witness. They take time linear in (placements + samples + placement ranks).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from megatron_dcp.errors import PlanError
from megatron_dcp.plan.replay import makespan_us
from megatron_dcp.plan.types import RECOMPUTE_KINDS, SCHEMES, Placement, StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLimits:
    """Attention heads of the model; `free` lifts the head limits (preset a100-gpt7b)."""

    heads: int
    kv_heads: int
    free: bool = False

    def ulysses_allows(self, degree: int) -> bool:
        """d divides H, and d divides Hk or Hk divides d."""
        if self.free:
            return True
        h, hk = self.heads, self.kv_heads
        return h % degree == 0 and (hk % degree == 0 or degree % hk == 0)


def _fail(invariant: str, message: str, witness: object) -> None:
    raise PlanError(message, invariant=invariant, witness=witness)


def _name(p: Placement) -> str:
    return f"placement (slot {p.slot}, ranks {p.first_rank}..{p.first_rank + p.degree - 1})"


def covers_every_sample_once(plan: StepPlan) -> None:
    """The plan never changes the global batch: each sample is placed exactly once."""
    seen = [0] * len(plan.workload.lengths)
    for p in plan.placements:
        if not p.samples:
            _fail("covers_every_sample_once", f"{_name(p)} holds no sample", p)
        for i in p.samples:
            if not 0 <= i < len(seen):
                _fail(
                    "covers_every_sample_once",
                    f"{_name(p)} names sample {i}, which is not in 0..{len(seen) - 1}",
                    i,
                )
            seen[i] += 1
    for i, times in enumerate(seen):
        if times != 1:
            _fail("covers_every_sample_once", f"sample {i} is placed {times} times", i)


def blocks_are_disjoint_within_a_slot(plan: StepPlan) -> None:
    """In one slot a rank runs one placement; fused placements nest instead."""
    last: dict[int, Placement] = {}
    slot = None
    for p in plan.placements:
        if p.slot != slot:
            last, slot = {}, p.slot
        for r in p.ranks:
            q = last.get(r)
            if q is not None and not (p.fused and q.fused and set(p.ranks) <= set(q.ranks)):
                _fail(
                    "blocks_are_disjoint_within_a_slot",
                    f"rank {r} is in {_name(q)} and in {_name(p)} of the same slot",
                    (q, p),
                )
            last[r] = p


def fits_memory(plan: StepPlan) -> None:
    """Predicted bytes per rank of each placement stay within the budget."""
    for p in plan.placements:
        if p.bytes > plan.budget_bytes:
            _fail(
                "fits_memory",
                f"{_name(p)} needs {p.bytes} bytes per rank, the budget is {plan.budget_bytes}",
                p,
            )
        if not 0 <= p.recompute <= plan.layers:
            _fail(
                "fits_memory",
                f"{_name(p)} recomputes {p.recompute} layers, the model has "
                f"0..{plan.layers} per stage",
                p,
            )


def _degree_fault(plan: StepPlan, p: Placement, heads: HeadLimits | None) -> str | None:
    t = plan.topology
    u = p.inner_degree
    if not t.legal_degree(p.degree) or not t.block_fits(p.first_rank, p.degree):
        return (
            f"blocks lie inside one node of {t.ranks_per_node} ranks or are whole nodes, "
            f"among ranks 0..{t.data_ranks - 1}"
        )
    if p.scheme not in SCHEMES or p.recompute_kind not in RECOMPUTE_KINDS:
        return f"unknown scheme {p.scheme!r} or recompute kind {p.recompute_kind!r}"
    if (p.degree == 1) != (p.scheme == "local"):
        return f"degree {p.degree} with scheme {p.scheme!r}; degree 1 and only it is local"
    if p.scheme in ("local", "ring", "allgather"):
        return None if u == 1 else f"scheme {p.scheme} has inner_degree 1, found {u}"
    if p.scheme == "ulysses" and u != p.degree:
        return f"scheme ulysses has inner_degree = degree, found {u}"
    if u < 1 or p.degree % u or (p.scheme == "hybrid" and not 1 < u < p.degree):
        return f"inner_degree {u} must divide degree {p.degree} and lie strictly between 1 and it"
    if u > t.ranks_per_node or (t.ranks_per_node % u and p.degree > t.ranks_per_node):
        return f"all-to-all over {u} ranks does not stay inside nodes of {t.ranks_per_node}"
    if heads is not None and not heads.ulysses_allows(u):
        return (
            f"ulysses over {u} ranks with {heads.heads} heads and {heads.kv_heads} KV heads; "
            "it must divide the heads, and divide or be a multiple of the KV heads"
        )
    return None


def respects_degree_limits(plan: StepPlan, heads: HeadLimits | None = None) -> None:
    """Degrees, blocks and schemes that the topology and the attention heads allow."""
    for p in plan.placements:
        fault = _degree_fault(plan, p, heads)
        if fault:
            _fail("respects_degree_limits", f"{_name(p)}, scheme {p.scheme}: {fault}", p)


def order_has_no_cyclic_wait(plan: StepPlan) -> None:
    """Every rank runs its placements in increasing (slot, first_rank): one global order."""
    last = None
    for p in plan.placements:
        if p.slot < 0:
            _fail("order_has_no_cyclic_wait", f"{_name(p)}: slots start at 0", p)
        if last is not None and p.order < last.order:
            _fail("order_has_no_cyclic_wait", f"{_name(p)} stands after {_name(last)}", (last, p))
        last = p


def lockstep_slots_match(plan: StepPlan) -> None:
    """Domains tile the ranks; a domain's slots are contiguous from 0, and so is every coupled one.

    Ranks of a domain without a placement in a slot run a dummy there, so only the slots that a
    domain uses must have no hole; a slot in which no rank of the domain has work would be all
    dummies.
    """
    n, domain = plan.topology.data_ranks, plan.lockstep
    if domain < 1 or n % domain:
        _fail("lockstep_slots_match", f"domains of {domain} ranks do not tile {n} ranks", domain)
    if domain == 1:
        return
    used: list[set[int]] = [set() for _ in range(n // domain)]
    for p in plan.placements:
        for d in range(p.first_rank // domain, (p.first_rank + p.degree - 1) // domain + 1):
            used[d].add(p.slot)
    for d, slots in enumerate(used):
        if slots and len(slots) != max(slots) + 1 and domain == n:
            hole = next(k for k in count() if k not in slots)
            _fail(
                "lockstep_slots_match",
                f"domain {d} has no placement in slot {hole} but in "
                "later ones: a slot of dummies only",
                (d, hole),
            )


def recompute_scope_respected(plan: StepPlan) -> None:
    """Lockstep over all ranks (ZeRO-3): one recompute value per slot."""
    if plan.lockstep != plan.topology.data_ranks or plan.lockstep == 1:
        return
    first: dict[int, Placement] = {}
    for p in plan.placements:
        q = first.setdefault(p.slot, p)
        if (p.recompute, p.recompute_kind) != (q.recompute, q.recompute_kind):
            _fail(
                "recompute_scope_respected",
                f"slot {p.slot} recomputes {q.recompute} layers on "
                f"ranks {q.first_rank}.. and {p.recompute} on ranks {p.first_rank}..",
                (q, p),
            )


def makespan_is_the_replay(plan: StepPlan) -> None:
    """The makespan that the plan states is what its own times give."""
    replayed = makespan_us(plan)
    if replayed != plan.makespan_us:
        _fail(
            "makespan_is_the_replay",
            f"the plan states {plan.makespan_us} us, its placements replay to {replayed} us",
            (plan.makespan_us, replayed),
        )


INVARIANTS: tuple[Callable[[StepPlan], None], ...] = (
    covers_every_sample_once,
    order_has_no_cyclic_wait,
    blocks_are_disjoint_within_a_slot,
    fits_memory,
    lockstep_slots_match,
    recompute_scope_respected,
    makespan_is_the_replay,
)


# A plan made elsewhere may state times and bytes of its own, but not a step that cannot be run.
RUNNABLE: tuple[Callable[[StepPlan], None], ...] = (
    covers_every_sample_once,
    order_has_no_cyclic_wait,
    blocks_are_disjoint_within_a_slot,
    lockstep_slots_match,
    recompute_scope_respected,
)


def check_plan(plan: StepPlan, heads: HeadLimits | None = None) -> StepPlan:
    """Run every invariant; returns the plan, or raises PlanError naming the broken one."""
    respects_degree_limits(plan, heads)
    for invariant in INVARIANTS:
        invariant(plan)
    return plan


def check_runnable(plan: StepPlan, heads: HeadLimits | None = None) -> StepPlan:
    """What a runtime asks of a plan from anywhere; returns it, or raises PlanError.

    All that could hang ranks or lose a sample: degrees and heads, coverage, blocks, order,
    lockstep, scope of recomputation. Fused groups are simulated but not run (docs/log.md).
    """
    respects_degree_limits(plan, heads)
    for invariant in RUNNABLE:
        invariant(plan)
    for p in plan.placements:
        if p.fused:
            raise PlanError(
                f"{_name(p)} is `fused`: this runtime runs every placement in a forward of its "
                "own; make the plan without fused groups"
            )
    return plan
