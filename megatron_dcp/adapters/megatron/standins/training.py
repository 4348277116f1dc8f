"""What `megatron.training.pretrain` asks besides: a device's properties, counters, device ids."""

from __future__ import annotations

import types
from typing import Any

import torch

from megatron_dcp.adapters.megatron.standins.pieces import Setter, StandIn


def _presence(put: Setter) -> None:
    """`megatron.training.initialize` asserts a GPU and reads its properties."""
    properties = types.SimpleNamespace(
        name="cpu", major=0, minor=0, total_memory=1 << 34, multi_processor_count=1
    )
    put.attribute(torch.cuda, "is_available", lambda: True)
    put.attribute(torch.cuda, "get_device_properties", lambda device=None: properties)
    put.attribute(torch.cuda, "get_device_capability", lambda device=None: (0, 0))
    put.attribute(torch.cuda, "get_device_name", lambda device=None: "cpu")
    put.attribute(torch.nn.Module, "cuda", lambda self, device=None: self)


def _counters(put: Setter) -> None:
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


def _process_group_arguments(put: Setter) -> None:
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


def _fused_kernels(put: Setter) -> None:
    """Source trees up to 0.16 ask nvcc for its version before they build fused kernels."""
    try:
        from megatron.legacy import fused_kernels
    except ImportError:
        return
    put.attribute(fused_kernels, "load", lambda args: None)


TRAINING: tuple[StandIn, ...] = (
    StandIn(
        name="presence",
        reason="the start-up asserts a GPU and logs its properties",
        call_sites="megatron.training.initialize, arguments.validate_args",
        install=_presence,
    ),
    StandIn(
        name="counters",
        reason="memory and clocks are logged",
        call_sites="megatron.training.training.training_log, report_memory",
        install=_counters,
    ),
    StandIn(
        name="process_group_arguments",
        reason="device ids are passed to the process group",
        call_sites="megatron.training.initialize, utils.print_datetime",
        install=_process_group_arguments,
    ),
    StandIn(
        name="fused_kernels",
        reason="kernels are built with nvcc at the start",
        call_sites="megatron.training.initialize._compile_dependencies",
        install=_fused_kernels,
    ),
)
