"""What megatron-core needs of `torch.cuda` to build, train and clip."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron_dcp.adapters.megatron.standins.pieces import Setter, StandIn


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


def _device_mode(put: Setter) -> None:
    mode = CpuDeviceMode()
    mode.__enter__()  # type: ignore[no-untyped-call]
    put.finally_(lambda: mode.__exit__(None, None, None))  # type: ignore[no-untyped-call]
    # `backward` is a torch call: the mode is off while it runs, and recomputed layers run in it.
    run = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return run(*args, **kwargs)

    put.attribute(torch.autograd, "_engine_run_backward", run_backward)


def _current_device(put: Setter) -> None:
    put.attribute(torch.cuda, "current_device", lambda: 0)
    put.attribute(torch.cuda, "set_device", lambda device: None)
    put.attribute(torch.cuda, "device_count", lambda: 1)


def _rng(put: Setter) -> None:
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


def _streams(put: Setter) -> None:
    put.attribute(torch.cuda, "Stream", _Stream)
    put.attribute(torch.cuda, "Event", _Event)
    put.attribute(torch.cuda, "current_stream", lambda device=None: _Stream())
    put.attribute(torch.cuda, "default_stream", lambda device=None: _Stream())
    put.attribute(torch.cuda, "set_stream", lambda stream: None)
    put.attribute(torch.cuda, "stream", lambda stream: nullcontext())
    put.attribute(torch.Tensor, "record_stream", lambda self, stream: None)


def _type_strings(put: Setter) -> None:
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


def _synchronize(put: Setter) -> None:
    put.attribute(torch.cuda, "synchronize", lambda device=None: None)
    put.attribute(torch.cuda, "empty_cache", lambda: None)


def _engine_name(put: Setter) -> None:
    """0.16's experts use a name of Transformer Engine that its guard leaves out."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        put.attribute(moe_utils, "te_general_gemm", None)


def _split_sizes(put: Setter) -> None:
    """The dispatcher of experts moves its split sizes to the CPU only if they are on a GPU."""
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


CORE: tuple[StandIn, ...] = (
    StandIn(
        name="device_mode",
        reason="tensors are made with device='cuda' or an index",
        call_sites="schedules, layers, param_and_grad_buffer, clip_grads, everywhere",
        install=_device_mode,
    ),
    StandIn(
        name="current_device",
        reason="the index is asked before each allocation",
        call_sites="tensor_parallel.layers, parallel_state, optimizer",
        install=_current_device,
    ),
    StandIn(
        name="rng",
        reason="the RNG tracker forks cuda generators at initialisation and in recompute",
        call_sites="tensor_parallel.random, model parallel seeding",
        install=_rng,
    ),
    StandIn(
        name="streams",
        reason="gradient buckets and pipelines order work by streams and events",
        call_sites="param_and_grad_buffer, p2p_communication, timers",
        install=_streams,
    ),
    StandIn(
        name="type_strings",
        reason="parameters are grouped by 'torch.cuda.FloatTensor' and the like",
        call_sites="optimizer, distrib_optimizer, clip_grads",
        install=_type_strings,
    ),
    StandIn(
        name="synchronize",
        reason="called without asking whether a device exists",
        call_sites="p2p_communication, timers, checkpointing",
        install=_synchronize,
    ),
    StandIn(
        name="engine_name",
        reason="a name that is defined only where Transformer Engine is installed",
        call_sites="moe.moe_utils.router_gating_linear",
        install=_engine_name,
    ),
    StandIn(
        name="split_sizes",
        reason="split sizes of the expert all-to-all stay tensors where there is no GPU",
        call_sites="tensor_parallel.mappings._AllToAll, moe.token_dispatcher",
        install=_split_sizes,
    ),
)
