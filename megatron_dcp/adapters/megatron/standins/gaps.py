"""Gaps of Megatron's wheels that are not about devices: unguarded imports and missing names."""

from __future__ import annotations

import builtins
import importlib.util
import typing
from typing import Any

from megatron_dcp.adapters.megatron.standins.pieces import Setter, StandIn

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


def _wheel_gaps(put: Setter) -> None:
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


GAPS: tuple[StandIn, ...] = (
    StandIn(
        name="wheel_gaps",
        reason="modules and names that the wheel or Python 3.11 lack",
        call_sites="megatron.core.transformer.moe, megatron.training.initialize",
        install=_wheel_gaps,
    ),
)
