"""CPU stand-ins: what Megatron needs of `torch.cuda` to train on a machine without a GPU.

Used for tests, examples and laptops; `install` refuses where a GPU is present. Megatron names the
device "cuda" in about two hundred places and asks for streams, events, generators and counters
that CPU builds of torch lack. Each StandIn below says what it serves; removing one makes the named
call sites fail. With gloo as backend nothing else is needed: it has every collective.

Two groups: `core` is what megatron-core needs to build, train and clip; `training` is what
`megatron.training.pretrain` asks for besides. The device mode costs about 3 us per torch call.
"""

from __future__ import annotations

import builtins
import importlib.util
import logging
import os
import types
import typing
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron_dcp.errors import AdapterError


@dataclass(frozen=True, slots=True, kw_only=True)
class StandIn:
    """One piece: why it is needed and which call sites of Megatron it serves."""

    name: str
    group: str
    reason: str
    call_sites: str
    install: Callable[[_Setter], None]


class _Setter:
    """Sets attributes and items and remembers the way back."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def attribute(self, owner: Any, name: str, value: Any) -> None:
        missing = not hasattr(owner, name)
        before = None if missing else getattr(owner, name)
        self._undo.append(
            (lambda: delattr(owner, name)) if missing else lambda: setattr(owner, name, before)
        )
        setattr(owner, name, value)

    def finally_(self, call: Callable[[], None]) -> None:
        self._undo.append(call)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()


# --- core ------------------------------------------------------------------------------------


def _cpu_device(value: Any) -> Any:
    """A cuda device in any spelling (index, string, torch.device) as the CPU."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return torch.device("cpu")
    if isinstance(value, str) and value.startswith("cuda"):
        return torch.device("cpu")
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return value


class CpuDeviceMode(TorchFunctionMode):
    """Maps cuda devices and pinned memory in every torch call to plain CPU memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func in (torch.Tensor.pin_memory, torch.Tensor.is_pinned):
            return args[0] if func is torch.Tensor.pin_memory else False
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _cpu_device(kwargs["device"])}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.to:
            args = tuple(a if isinstance(a, bool) else _cpu_device(a) for a in args)
        return func(*args, **kwargs)


def _device_mode(put: _Setter) -> None:
    mode = CpuDeviceMode()
    mode.__enter__()  # type: ignore[no-untyped-call]
    put.finally_(lambda: mode.__exit__(None, None, None))  # type: ignore[no-untyped-call]
    # `backward` is a torch call: the mode is off while it runs, and recomputed layers run in it.
    run = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return run(*args, **kwargs)

    put.attribute(torch.autograd, "_engine_run_backward", run_backward)


def _current_device(put: _Setter) -> None:
    put.attribute(torch.cuda, "current_device", lambda: 0)
    put.attribute(torch.cuda, "set_device", lambda device: None)
    put.attribute(torch.cuda, "device_count", lambda: 1)


def _rng(put: _Setter) -> None:
    """The cuda generator is the CPU generator.

    DEVIATION: both sides then draw from one stream, so a run's random numbers differ from a GPU's;
    they are still equal between two CPU runs, which is what the tests compare.
    """

    def get(device: Any = "cuda") -> torch.Tensor:
        return torch.get_rng_state()

    def put_state(state: torch.Tensor, device: Any = "cuda") -> None:
        torch.set_rng_state(state)

    def seed(value: int) -> None:
        torch.default_generator.manual_seed(value)

    put.attribute(torch.cuda, "get_rng_state", get)
    put.attribute(torch.cuda, "set_rng_state", put_state)
    put.attribute(torch.cuda, "manual_seed", seed)
    put.attribute(torch.cuda, "manual_seed_all", seed)
    put.attribute(torch.cuda, "default_generators", (torch.default_generator,))
    from megatron.core.tensor_parallel import random as tp_random

    # It warns when the CPU generator moves inside a cuda fork: here they are one and the same.
    logger = logging.getLogger(tp_random.__name__)
    level = logger.level
    logger.setLevel(logging.ERROR)
    put.finally_(lambda: logger.setLevel(level))

    def tp_get(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def tp_set(state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(state)

    put.attribute(tp_random, "_set_cuda_rng_state", tp_set)
    if hasattr(tp_random, "_get_cuda_rng_state"):
        put.attribute(tp_random, "_get_cuda_rng_state", tp_get)


class _Stream:
    """A stream on which everything is already done."""

    cuda_stream = 0
    device = torch.device("cpu")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        return None

    wait_stream = wait_event = synchronize = record = wait = _nothing

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def query(self) -> bool:
        return True


class _Event(_Stream):
    def elapsed_time(self, other: Any) -> float:
        return 0.0


def _streams(put: _Setter) -> None:
    put.attribute(torch.cuda, "Stream", _Stream)
    put.attribute(torch.cuda, "Event", _Event)
    put.attribute(torch.cuda, "current_stream", lambda device=None: _Stream())
    put.attribute(torch.cuda, "default_stream", lambda device=None: _Stream())
    put.attribute(torch.cuda, "set_stream", lambda stream: None)
    put.attribute(torch.cuda, "stream", lambda stream: nullcontext())
    put.attribute(torch.Tensor, "record_stream", lambda self, stream: None)


def _type_strings(put: _Setter) -> None:
    """`Tensor.type()` without argument answers with the cuda name of the type."""
    original = torch.Tensor.type

    def of(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            # Under the device mode the C method looks this attribute up again: rename once.
            name = original(self)
            cpu = not name.startswith("torch.cuda.")
            return name.replace("torch.", "torch.cuda.", 1) if cpu else name
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        return original(self, dtype, *args, **kwargs)

    put.attribute(torch.Tensor, "type", of)


def _synchronize(put: _Setter) -> None:
    put.attribute(torch.cuda, "synchronize", lambda device=None: None)
    put.attribute(torch.cuda, "empty_cache", lambda: None)


def _split_sizes(put: _Setter) -> None:
    """The dispatcher of experts moves its split sizes to the CPU only if they are on a GPU."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16: named without Transformer Engine too
        put.attribute(moe_utils, "te_general_gemm", None)
    original = torch.distributed.all_to_all_single

    def sizes(value: Any) -> Any:
        return value.tolist() if isinstance(value, torch.Tensor) else value

    def all_to_all_single(
        output: Any, input: Any, output_split_sizes: Any = None, input_split_sizes: Any = None,
        *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        return original(
            output, input, sizes(output_split_sizes), sizes(input_split_sizes), *args, **kwargs
        )

    put.attribute(torch.distributed, "all_to_all_single", all_to_all_single)


# --- training --------------------------------------------------------------------------------


def _presence(put: _Setter) -> None:
    """`megatron.training.initialize` asserts a GPU and reads its properties."""
    properties = types.SimpleNamespace(
        name="cpu", major=0, minor=0, total_memory=1 << 34, multi_processor_count=1
    )
    put.attribute(torch.cuda, "is_available", lambda: True)
    put.attribute(torch.cuda, "get_device_properties", lambda device=None: properties)
    put.attribute(torch.cuda, "get_device_capability", lambda device=None: (0, 0))
    put.attribute(torch.cuda, "get_device_name", lambda device=None: "cpu")
    put.attribute(torch.nn.Module, "cuda", lambda self, device=None: self)


def _counters(put: _Setter) -> None:
    for name in (
        "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved",
        "device_memory_used", "utilization", "temperature", "power_draw", "clock_rate",
    ):  # fmt: skip
        put.attribute(torch.cuda, name, lambda *args, **kwargs: 0)
    put.attribute(torch.cuda, "memory_stats", lambda *args, **kwargs: _ZeroDict())
    put.attribute(torch.cuda, "mem_get_info", lambda *args, **kwargs: (1 << 34, 1 << 34))
    put.attribute(torch.cuda, "reset_peak_memory_stats", lambda *args, **kwargs: None)


class _ZeroDict(dict[str, int]):
    def __missing__(self, key: str) -> int:
        return 0


def _process_group_arguments(put: _Setter) -> None:
    """gloo takes neither a device id nor device ids."""
    dist = torch.distributed
    init, barrier = dist.init_process_group, dist.barrier

    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        if kwargs.get("backend") == "nccl":
            kwargs["backend"] = "gloo"
        return init(*args, **kwargs)

    def plain_barrier(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_ids", None)
        return barrier(*args, **kwargs)

    put.attribute(dist, "init_process_group", init_process_group)
    put.attribute(dist, "barrier", plain_barrier)


# Modules of Megatron that import triton without asking whether it is there. Only they are given a
# stand-in: a fake module for all would make torch and Megatron's guarded imports believe in it.
_UNGUARDED = (
    "megatron.core.transformer.moe.paged_stash",
    "megatron.core.transformer.moe.ops.paged_stash",
    "megatron.core.ssm.ops.",
    "megatron.core.transformer.custom_layers.batch_invariant_kernels",
    "megatron.core.inference.contexts.",
)


class _Nothing:
    """Has every attribute; as a decorator it gives the function back. Its kernels never run."""

    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> _Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self


def _wheel_gaps(put: _Setter) -> None:
    """Gaps of the wheels that are not about devices.

    The wheel has no Makefile for `compile_helpers`, though its compiled helpers import; 0.18 and
    later import triton unguarded in modules that a GPT never runs; 0.19 uses `typing.override`,
    which Python 3.11 lacks.
    """
    if not hasattr(typing, "override"):
        put.attribute(typing, "override", lambda method: method)
    if importlib.util.find_spec("triton") is None:
        original = builtins.__import__

        def import_(name: str, scope: Any = None, *args: Any, **kwargs: Any) -> Any:
            asker = (scope or {}).get("__name__") or ""
            if name.split(".")[0] == "triton" and asker.startswith(_UNGUARDED):
                return _Nothing()
            return original(name, scope, *args, **kwargs)

        put.attribute(builtins, "__import__", import_)
    try:
        from megatron.core.datasets import helpers_cpp, utils  # noqa: F401
    except ImportError:
        return
    put.attribute(utils, "compile_helpers", lambda: None)


def _fused_kernels(put: _Setter) -> None:
    """Source trees up to 0.16 ask nvcc for its version before they build fused kernels."""
    try:
        from megatron.legacy import fused_kernels
    except ImportError:
        return
    put.attribute(fused_kernels, "load", lambda args: None)


PIECES: tuple[StandIn, ...] = (
    StandIn(
        name="wheel_gaps",
        group="core",
        reason="modules and names that the wheel or Python 3.11 lack",
        call_sites="megatron.core.transformer.moe, megatron.training.initialize",
        install=_wheel_gaps,
    ),
    StandIn(
        name="device_mode",
        group="core",
        reason="tensors are made with device='cuda' or an index",
        call_sites="schedules, layers, param_and_grad_buffer, clip_grads, everywhere",
        install=_device_mode,
    ),
    StandIn(
        name="current_device",
        group="core",
        reason="the index is asked before each allocation",
        call_sites="tensor_parallel.layers, parallel_state, optimizer",
        install=_current_device,
    ),
    StandIn(
        name="rng",
        group="core",
        reason="the RNG tracker forks cuda generators at initialisation and in recompute",
        call_sites="tensor_parallel.random, model parallel seeding",
        install=_rng,
    ),
    StandIn(
        name="streams",
        group="core",
        reason="gradient buckets and pipelines order work by streams and events",
        call_sites="param_and_grad_buffer, p2p_communication, timers",
        install=_streams,
    ),
    StandIn(
        name="type_strings",
        group="core",
        reason="parameters are grouped by 'torch.cuda.FloatTensor' and the like",
        call_sites="optimizer, distrib_optimizer, clip_grads",
        install=_type_strings,
    ),
    StandIn(
        name="synchronize",
        group="core",
        reason="called without asking whether a device exists",
        call_sites="p2p_communication, timers, checkpointing",
        install=_synchronize,
    ),
    StandIn(
        name="split_sizes",
        group="core",
        reason="split sizes of the expert all-to-all stay tensors where there is no GPU",
        call_sites="tensor_parallel.mappings._AllToAll, moe.token_dispatcher",
        install=_split_sizes,
    ),
    StandIn(
        name="presence",
        group="training",
        reason="the start-up asserts a GPU and logs its properties",
        call_sites="megatron.training.initialize, arguments.validate_args",
        install=_presence,
    ),
    StandIn(
        name="counters",
        group="training",
        reason="memory and clocks are logged",
        call_sites="megatron.training.training.training_log, report_memory",
        install=_counters,
    ),
    StandIn(
        name="process_group_arguments",
        group="training",
        reason="device ids are passed to the process group",
        call_sites="megatron.training.initialize, utils.print_datetime",
        install=_process_group_arguments,
    ),
    StandIn(
        name="fused_kernels",
        group="training",
        reason="kernels are built with nvcc at the start",
        call_sites="megatron.training.initialize._compile_dependencies",
        install=_fused_kernels,
    ),
)


@dataclass(slots=True)
class Installed:
    """Stand-ins in force; `undo` takes them out again."""

    names: tuple[str, ...]
    _setters: list[_Setter]

    def undo(self) -> None:
        while self._setters:
            self._setters.pop().undo()


_installed: Installed | None = None


def gpu_present() -> bool:
    """Whether a real GPU is there, also after `install`."""
    return _installed is None and torch.cuda.is_available()


def install(*, training: bool = True, leave_out: tuple[str, ...] = ()) -> Installed:
    """Install the pieces, once per process. Raises AdapterError where a GPU is present.

    leave_out: pieces to skip; the tests use it to show that each one is necessary.
    """
    global _installed
    if _installed is not None:
        return _installed
    if torch.cuda.is_available():
        raise AdapterError(
            "CPU stand-ins were asked for and a GPU was found: they would hide it. "
            "Start without them (they are chosen only where torch.cuda.is_available() is False)"
        )
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # read by torch at its first compile
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # asserted by Megatron
    setters, names = [], []
    for piece in PIECES:
        if piece.name in leave_out or (piece.group == "training" and not training):
            continue
        setter = _Setter()
        piece.install(setter)
        setters.append(setter)
        names.append(piece.name)
    _installed = Installed(names=tuple(names), _setters=setters)
    return _installed


def remove() -> None:
    """Take the stand-ins out again."""
    global _installed
    if _installed is not None:
        _installed.undo()
        _installed = None
