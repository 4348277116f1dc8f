"""What a trainer's wrapper allows: one descriptor per backend, found from the model itself.

A wrapper decides when gradients and parameters cross ranks, and that decides which plans are legal:

* **Count policy** (`lockstep`): with `1` ranks may run different numbers of microbatches; with
  `all` every backward (or forward) holds a collective of all data ranks, so all run one microbatch
  or one dummy in every slot; with `domain` those ranks do that share one copy of the parameters,
  and other domains run other counts. Equal counts alone are not enough: the members of a block must
  run it in the same slot.
* **Recompute scope**: `placement`, or `slot` where recomputing gathers parameters again, so that
  all ranks of a slot must choose alike.
* **Objective**: `max-of-sums` (each rank's own total counts) or `sum-of-maxima` (every slot waits
  for its slowest rank).

`detect` names the backend of a model and refuses what it does not know. It imports no trainer: a
DeepSpeed engine is recognised by the name of its class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from megatron_dcp.errors import AdapterError

RecomputeScope = Literal["placement", "slot"]
Objective = Literal["max-of-sums", "sum-of-maxima"]
Part = Literal["parameters", "gradients", "optimizer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """How one wrapper may be driven.

    least_microbatches: how many a rank must run per step (real or dummy).
    sharded: what a rank holds only a share of, all the time.
    held: sharded parts that a rank holds whole between the microbatches of a step all the same.
    averages: whether the wrapper divides the summed gradients by the number of data ranks.
    reduces: whether the wrapper reduces gradients at all (else the engine does).
    closing_dummy: whether the step ends with one dummy on every rank, in which the wrapper reduces.
    domain: how many neighbouring data ranks share one copy of what is sharded; None: all.
    """

    name: str
    lockstep: Literal["1", "domain", "all"] = "1"
    least_microbatches: int = 1
    recompute_scope: RecomputeScope = "placement"
    sharded: frozenset[Part] = frozenset()
    held: frozenset[Part] = frozenset()
    averages: bool = True
    reduces: bool = True
    closing_dummy: bool = False
    domain: int | None = None

    @property
    def objective(self) -> Objective:
        return "max-of-sums" if self.lockstep == "1" else "sum-of-maxima"

    @property
    def needed_lockstep(self) -> str:
        """The smallest lockstep domain that cannot deadlock, as option `lockstep` takes it."""
        return str(self.domain) if self.lockstep == "domain" else self.lockstep

    def whole(self, part: Part) -> bool:
        """Whether a rank holds the whole of a part while it runs a step's microbatches."""
        return part not in self.sharded or part in self.held

    def resident_bytes(
        self,
        parameters: int,
        shards: int,
        *,
        element_bytes: int,
        gradient_bytes: int | None = None,
        optimizer_bytes: int = 8,
    ) -> int:
        """Bytes of parameters, gradients and optimizer state of one rank during a step.

        parameters: their number; shards: over how many ranks sharded parts are divided;
        element_bytes, gradient_bytes, optimizer_bytes: per parameter (Adam in fp32: 8).
        """
        sizes: tuple[tuple[Part, int], ...] = (
            ("parameters", element_bytes),
            ("gradients", element_bytes if gradient_bytes is None else gradient_bytes),
            ("optimizer", optimizer_bytes),
        )
        return sum(
            parameters * size if self.whole(part) else -(-parameters * size // shards)
            for part, size in sizes
        )


_OPT: frozenset[Part] = frozenset({"optimizer"})
_GRAD: frozenset[Part] = frozenset({"gradients", "optimizer"})
_ALL: frozenset[Part] = frozenset({"parameters", "gradients", "optimizer"})

BACKENDS: dict[str, Backend] = {
    b.name: b
    for b in (
        # The engine sums gradients once per step with a flat all-reduce.
        Backend(name="bare", least_microbatches=0, averages=False, reduces=False),
        # Buckets reduce in the background of the last backward.
        Backend(name="ddp"),
        Backend(name="zero0"),
        Backend(name="zero1", sharded=_OPT),
        # One flush after the last backward: full gradients are held until then.
        Backend(name="zero2-coalesced", sharded=_GRAD, held=frozenset({"gradients"})),
        # A reduction in every backward, so unequal counts deadlock.
        Backend(name="zero2", lockstep="all", sharded=_GRAD),
        # A parameter gather in every forward, backward and recomputation.
        Backend(name="zero3", lockstep="all", recompute_scope="slot", sharded=_ALL),
        Backend(name="fsdp2", lockstep="all", sharded=_ALL),
        # Sharded inside a domain (a node), copied across domains: gathers and reduce-scatters stay
        # inside, the copies are summed once per step. That waits for the other domains, so it is
        # done where no rank is inside a block: in one dummy after the last microbatch.
        Backend(
            name="hsdp",
            lockstep="domain",
            sharded=_ALL,
            least_microbatches=0,
            closing_dummy=True,
        ),
        # Parameters gathered once, gradients reduced once. Both happen where no rank is inside a
        # block: before the first microbatch and in one dummy after the last, else a rank in its
        # last backward would wait for a rank that waits for it in a block.
        Backend(
            name="fsdp2-keep",
            sharded=_ALL,
            held=frozenset({"parameters", "gradients"}),
            least_microbatches=0,
            closing_dummy=True,
        ),
    )
}

SUPPORTED = (
    "a plain module (gradients are reduced by megatron-dcp), DistributedDataParallel, FSDP2 "
    "(torch.distributed.fsdp.fully_shard; resharding, keep and HSDP), a DeepSpeed engine with ZeRO "
    "stage 0, 1, 2 or 3, and any of these prepared by Accelerate"
)

_ENGINE = "deepspeed.runtime.engine.DeepSpeedEngine"
_PIPELINE = "deepspeed.runtime.pipe.engine.PipelineEngine"

# Wrappers that are recognised and cannot be driven, with what to do instead.
_REFUSED = {
    "torch.nn.parallel.data_parallel.DataParallel": (
        "it splits a batch over the devices of one process; use DistributedDataParallel"
    ),
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": (
        "FSDP1 gathers flattened parameters in every forward; use "
        "torch.distributed.fsdp.fully_shard (Accelerate: fsdp_version=2)"
    ),
    _PIPELINE: "its pipeline schedule is fixed; use ZeRO without PipelineModule",
    "torch.optim.swa_utils.AveragedModel": "pass the model that is trained, not its average",
}


def qualified_names(obj: object) -> list[str]:
    """`module.Class` of an object's class and its bases, nearest first."""
    return [f"{c.__module__}.{c.__qualname__}" for c in type(obj).__mro__]


def is_deepspeed(model: object) -> bool:
    """Whether an object is a DeepSpeed engine, without importing DeepSpeed."""
    return _ENGINE in qualified_names(model)


def is_fsdp2(model: nn.Module) -> bool:
    """Whether `fully_shard` was applied to a module or to any inside it."""
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(m, FSDPModule) for m in model.modules())


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module inside torch.compile, DDP and DeepSpeed wrappers."""
    seen: nn.Module = model
    while True:
        inner = getattr(seen, "_orig_mod", None)
        if inner is None and (
            isinstance(seen, nn.parallel.DistributedDataParallel) or is_deepspeed(seen)
        ):
            inner = seen.module
        if not isinstance(inner, nn.Module):
            return seen
        seen = inner


def detect(model: nn.Module, *, name: str | None = None) -> Backend:
    """The backend of a model, or the named one where the model admits it.

    Raises AdapterError for a wrapper that is unknown or cannot be driven.
    """
    if not isinstance(model, nn.Module):
        raise AdapterError(
            f"expected a torch module or a DeepSpeed engine, found {type(model).__name__}; "
            f"supported: {SUPPORTED}"
        )
    _refuse(model)
    found = _found(model)
    domain = hybrid_domain(model) if found in ("fsdp2", "fsdp2-keep", "hsdp") else None
    if name is None or name == found:
        return replace(BACKENDS[found], domain=domain)
    if name not in BACKENDS:
        raise AdapterError(f"backend {name!r} is unknown; known: {', '.join(BACKENDS)}")
    if name not in _ADMITS.get(found, ()):
        raise AdapterError(
            f"backend {name!r} was asked, but the model is driven as {found!r}, which admits "
            f"{', '.join((found, *_ADMITS.get(found, ())))}"
        )
    return replace(BACKENDS[name], domain=domain)


# What a user may ask for instead of what was found.
_ADMITS: dict[str, tuple[str, ...]] = {
    "fsdp2": ("fsdp2-keep",),
    "fsdp2-keep": ("fsdp2",),
    "hsdp": ("fsdp2", "fsdp2-keep"),
    "zero2": ("zero2-coalesced",),
}


def _refuse(model: nn.Module) -> None:
    for module in _chain(model):
        for name in qualified_names(module):
            if name in _REFUSED:
                raise AdapterError(
                    f"{name.rsplit('.', 1)[1]} cannot be driven: {_REFUSED[name]}. "
                    f"Supported: {SUPPORTED}"
                )
        if isinstance(module, nn.parallel.DistributedDataParallel) and module.static_graph:
            raise AdapterError(
                "DistributedDataParallel(static_graph=True) cannot skip its reduction in some "
                "microbatches (no_sync); build it with static_graph=False"
            )
    inner = unwrap(model)
    children = [name for name, _ in inner.named_children()]
    own = [name for name, _ in inner.named_parameters(recurse=False)]
    if children == ["module"] and not own and not is_fsdp2(inner):
        raise AdapterError(
            f"{type(inner).__module__}.{type(inner).__qualname__} looks like a wrapper that is "
            f"not known here (its only child is `module`). Supported: {SUPPORTED}. If it does no "
            "communication of its own, pass the module inside it"
        )


def _chain(model: nn.Module) -> list[nn.Module]:
    """The model and what it wraps, outermost first."""
    out = [model]
    while True:
        last = out[-1]
        inner = getattr(last, "_orig_mod", None)
        if inner is None:
            inner = getattr(last, "module", None)
        if not isinstance(inner, nn.Module):
            return out
        out.append(inner)


def _found(model: nn.Module) -> str:
    for module in _chain(model):
        if is_deepspeed(module):
            return _zero_name(module)
        if isinstance(module, nn.parallel.DistributedDataParallel):
            return "ddp"
    if is_fsdp2(model):
        if _keeps_parameters(model):
            return "fsdp2-keep"
        return "fsdp2" if hybrid_domain(model) is None else "hsdp"
    return "bare"


def hybrid_domain(model: nn.Module) -> int | None:
    """Ranks that share one copy of a model's parameters under HSDP, a mesh of (replicate, shard).

    None where it is not that everywhere: one copy over all ranks, copies whose ranks are not
    neighbours, a mesh of more dimensions, or a torch in which the microbatches of a step may reduce
    different parameters of a group, whose partial sums could then not be added.
    """
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        return None
    found: set[int] = set()
    for p in model.parameters():
        if not isinstance(p, DTensor) or p.device_mesh.ndim != 2 or p.device_mesh.size(0) == 1:
            return None
        ranks = p.device_mesh.mesh.flatten().tolist()
        if not p.placements[0].is_replicate() or ranks != sorted(ranks):
            return None
        found.add(p.device_mesh.size(1))
    return found.pop() if len(found) == 1 else None


def _zero_name(engine: Any) -> str:
    """The stage decides; the coalesced form of ZeRO-2 is asked for, it costs whole gradients."""
    return f"zero{int(engine.zero_optimization_stage())}"


def _keeps_parameters(model: nn.Module) -> bool:
    """Whether every FSDP2 group was built with `reshard_after_forward=False`.

    The answer is not public; where it cannot be read the resharding backend is assumed, which is
    correct for both.
    """
    from torch.distributed.fsdp import FSDPModule

    groups = [
        group
        for m in model.modules()
        if isinstance(m, FSDPModule)
        for group in getattr(m._get_fsdp_state(), "_fsdp_param_groups", [None])
    ]
    return bool(groups) and all(
        getattr(group, "_reshard_after_forward", True) is False for group in groups
    )


ParameterFilter = Callable[[nn.Parameter], bool]


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that receive gradients, in the order of `named_parameters`, each once."""
    return [p for p in model.parameters() if p.requires_grad]


def unstepped(model: nn.Module, optimizer: Any) -> list[str]:
    """Names of trainable parameters that are in no param group; none where it has no groups."""
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:
        return []
    stepped = {p for group in groups for p in group["params"]}
    return [n for n, p in model.named_parameters() if p.requires_grad and p not in stepped]


def reshard(model: nn.Module) -> None:
    """Free what FSDP2 modules have gathered, on this rank alone; elsewhere nothing happens.

    A forward without a backward leaves the root's parameters gathered (kept ones all), and the next
    forward would run on these instead of what was written to the shards since.
    """
    from torch.distributed.fsdp import FSDPModule

    for m in model.modules():
        if isinstance(m, FSDPModule):
            m.reshard()


def touch(model: nn.Module) -> torch.Tensor:
    """A zero that depends on every trainable parameter: no rank then has an unused parameter.

    Added to the loss of a microbatch that may leave parameters out (an expert without tokens, a
    vision tower without images). One element per parameter is read; NaN and infinity are not
    carried over.
    """
    parts = [torch.nan_to_num(p.reshape(-1)[:1], 0.0, 0.0, 0.0).sum() for p in trainable(model)]
    if not parts:
        raise AdapterError("the model has no trainable parameter")
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.to(total)
    return total * 0.0
