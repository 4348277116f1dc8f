"""megatron-dcp: Data-Centric Parallel training (`import megatron_dcp as mdcp`).

Planning, simulating and reporting need no torch; the names of the runtime are resolved on first
use so that importing this package stays light.
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import Any

from megatron_dcp.errors import AdapterError, AgreementError, ConfigError, MdcpError, PlanError

try:
    __version__ = metadata.version("megatron-dcp")
except metadata.PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.0.0+source"

# Runtime names that import torch, and the module each lives in.
_LAZY = {
    "initialize": "megatron_dcp.adapters.torch",
    "attention": "megatron_dcp.schemes",
    "switch_rows": "megatron_dcp.schemes",
    "grid_rows": "megatron_dcp.schemes",
    "packed": "megatron_dcp.dist",
    "sample_dropout": "megatron_dcp.runtime.rng",
    "sample_generator": "megatron_dcp.runtime.rng",
}

__all__ = [
    "AdapterError",
    "AgreementError",
    "ConfigError",
    "MdcpError",
    "PlanError",
    "__version__",
    *_LAZY,
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
