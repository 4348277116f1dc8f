"""Attention over the current placement: `mdcp.attention` and the schemes behind it."""

from megatron_dcp.schemes import allgather, hybrid, local, ring, ulysses  # noqa: F401  (register)
from megatron_dcp.schemes.attention import attention
from megatron_dcp.schemes.grid import GridRows, grid_rows, switch_rows
from megatron_dcp.schemes.masks import Mask
from megatron_dcp.schemes.registry import (
    AttentionOptions,
    Scheme,
    find_scheme,
    register_scheme,
    scheme_names,
)

__all__ = [
    "AttentionOptions",
    "GridRows",
    "Mask",
    "Scheme",
    "attention",
    "find_scheme",
    "grid_rows",
    "register_scheme",
    "scheme_names",
    "switch_rows",
]
