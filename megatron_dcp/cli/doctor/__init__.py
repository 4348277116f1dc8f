"""`mdcp doctor`: what is installed, what is usable, and why not.

Reports and changes nothing; the exit status is 0 whatever it finds, and it needs neither torch nor
a trainer. Trainers are imported in processes of their own, because an import that crashes or hangs
is one of the things to report; `--quick` only looks them up.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from typing import Any

from megatron_dcp import __version__
from megatron_dcp.cli.doctor.communicators import estimate
from megatron_dcp.cli.doctor.native import (
    cuda_toolkit,
    gpus,
    ops_status,
    planner_status,
    torch_status,
)
from megatron_dcp.cli.doctor.trainers import patch_lines, probe_all
from megatron_dcp.errors import ConfigError

__all__ = ["main", "parser"]

SCHEMA = "mdcp.doctor/1"


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="mdcp doctor", description=__doc__.split("\n\n")[0])
    p.add_argument("--json", action="store_true", help="one JSON object on stdout")
    p.add_argument("--quick", action="store_true", help="look trainers up without importing them")
    p.add_argument("--ranks", type=int, default=None, help="data ranks: count the communicators")
    p.add_argument("--ranks-per-node", type=int, default=None, help="default: min(8, ranks)")
    return p


def examine(
    *, quick: bool = False, ranks: int | None = None, ranks_per_node: int | None = None
) -> dict[str, Any]:
    """Everything that is reported, as one JSON object."""
    groups = None
    if ranks is not None:
        groups = estimate(ranks, min(8, ranks) if ranks_per_node is None else ranks_per_node)
    trainers = probe_all(quick=quick)
    megatron = next(t for t in trainers if t["name"] == "megatron-core")
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "megatron_dcp": __version__,
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "torch": torch_status(),
        "planner": planner_status(),
        "ops": ops_status(),
        "cuda_toolkit": cuda_toolkit(),
        "gpus": gpus(),
        "trainers": trainers,
        "megatron_patches": patch_lines(megatron, quick=quick),
        "communicators": groups,
    }
    return found


def main(argv: list[str]) -> int:
    options = parser().parse_args(argv)
    if options.ranks is None and options.ranks_per_node is not None:
        raise ConfigError("--ranks-per-node counts communicators of --ranks; pass that too")
    found = examine(quick=options.quick, ranks=options.ranks, ranks_per_node=options.ranks_per_node)
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        print("\n".join(_lines(found)))
    return 0


def _lines(found: dict[str, Any]) -> list[str]:
    out = [
        f"megatron-dcp {found['megatron_dcp']}, Python {found['python']} ({found['executable']})",
        _row("torch", found["torch"]),
        _row("planner (_planner)", found["planner"]),
        _row("torch ops (_C)", found["ops"]),
        f"{'CUDA toolkit':<24} {found['cuda_toolkit']['text']}",
    ]
    out += [f"{'GPU':<24} {name}" for name in found["gpus"]["devices"]]
    if not found["gpus"]["devices"]:
        out.append(f"{'GPU':<24} none: {found['gpus']['reason']}")
    out.append("trainers")
    out += [_row(f"  {t['name']}", t) for t in found["trainers"]]
    patches = found["megatron_patches"]
    out.append("patches of `mdcp launch`" + (f": {patches['reason']}" if patches["reason"] else ""))
    out += [f"  {line}" for line in patches["lines"]]
    if found["communicators"]:
        out += [f"communicators: {line}" for line in found["communicators"]["text"]]
    return out


def _row(name: str, item: dict[str, Any]) -> str:
    """`usable` is True, False or None (not tried)."""
    word = {True: "ok", False: "no", None: "?"}[item["usable"]]
    version = item.get("version") or ""
    return f"{name:<24} {word:<3} {version:<14} {item['text']}".rstrip()
