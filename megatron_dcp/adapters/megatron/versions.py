"""Which Megatron is installed, and whether this package has been run against it.

The table lists what tests/contracts run (`package`: from the package index; `source`: the commit of
a Megatron-LM checkout, run by hand, see docs/integrations/megatron.md). A version outside it is
refused unless `--mdcp-allow-untested` is given; the signature probes of the PatchSet are never
waived, because a changed signature is a wrong run, not an untested one.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from megatron_dcp.errors import AdapterError


@dataclass(frozen=True, slots=True, kw_only=True)
class Tested:
    """One line of the version table. minor: `0.19`; how: what was run."""

    minor: str
    tag: str
    how: str


TABLE: tuple[Tested, ...] = (
    Tested(minor="0.16", tag="0.16.1", how="package (core), source core_v0.16.1"),
    Tested(minor="0.17", tag="core_v0.17.0", how="source"),
    Tested(minor="0.18", tag="core_v0.18.0", how="source"),
    Tested(minor="0.19", tag="0.19.2", how="package (core and training), source core_v0.19.0"),
    Tested(minor="0.20", tag="main", how="source"),
)


def installed_version() -> str:
    """Version of the importable megatron-core; raises AdapterError when there is none."""
    try:
        info = importlib.import_module("megatron.core.package_info")
    except ImportError as error:
        raise AdapterError(
            f"Megatron: looked for megatron.core.package_info, found {error}; install "
            "megatron-core or put a Megatron-LM checkout on PYTHONPATH"
        ) from error
    return str(info.__version__)


def tested_line(version: str) -> Tested | None:
    """The table's line for a version, or None."""
    minor = ".".join(version.split(".")[:2])
    return next((line for line in TABLE if line.minor == minor), None)


def require_tested(*, allow_untested: bool = False) -> str:
    """The installed version; raises AdapterError when it is outside the table."""
    version = installed_version()
    if tested_line(version) is None and not allow_untested:
        known = ", ".join(line.minor for line in TABLE)
        raise AdapterError(
            f"Megatron-Core {version} is installed, tested are {known}. Install one of these, or "
            "pass --mdcp-allow-untested (every patch still checks what it relies on)"
        )
    return version
