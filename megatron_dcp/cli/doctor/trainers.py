"""Trainer packages: version, and usable or the reason why not.

Each installed package is imported in a Python process of its own, two at a time: an import that
crashes, hangs or prints leaves the report intact.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

IMPORT_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """distributions: names in the package index; probe: the module whose import proves use."""

    name: str
    module: str
    probe: str
    distributions: tuple[str, ...]
    install: str


TRAINERS = (
    Trainer(
        name="megatron-core", module="megatron.core", distributions=("megatron-core",),
        probe="megatron.core.transformer.transformer_config", install="pip install megatron-core",
    ),
    Trainer(
        name="megatron.training", module="megatron.training", distributions=("megatron-core",),
        probe="megatron.training.arguments",
        install="put a Megatron-LM checkout on PYTHONPATH, or install a megatron-core that has it",
    ),
    Trainer(
        name="deepspeed", module="deepspeed", distributions=("deepspeed",), probe="deepspeed",
        install="pip install deepspeed",
    ),
    Trainer(
        name="transformers", module="transformers", distributions=("transformers",),
        probe="transformers.modeling_utils", install="pip install transformers",
    ),
    Trainer(
        name="accelerate", module="accelerate", distributions=("accelerate",), probe="accelerate",
        install="pip install accelerate",
    ),
    Trainer(
        name="trl", module="trl", distributions=("trl",), probe="trl.trainer.sft_trainer",
        install="pip install trl",
    ),
    Trainer(
        name="peft", module="peft", distributions=("peft",), probe="peft",
        install="pip install peft",
    ),
    Trainer(
        name="transformer_engine", module="transformer_engine", probe="transformer_engine.pytorch",
        distributions=("transformer-engine", "transformer_engine_torch"),
        install="pip install transformer-engine[pytorch] (CUDA)",
    ),
    Trainer(
        name="apex", module="apex", distributions=("apex",), probe="apex.normalization",
        install="build github.com/NVIDIA/apex; the `apex` of the package index is another project",
    ),
    Trainer(
        name="liger_kernel", module="liger_kernel", distributions=("liger-kernel",),
        probe="liger_kernel.ops.fused_linear_cross_entropy",
        install="pip install liger-kernel (needs Triton)",
    ),
    Trainer(
        name="flash_attn", module="flash_attn", distributions=("flash-attn",),
        probe="flash_attn.flash_attn_interface", install="pip install flash-attn (CUDA)",
    ),
)  # fmt: skip


def probe_all(*, quick: bool) -> list[dict[str, Any]]:
    """One dictionary per trainer: name, version, usable (None: not tried), text."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        return list(pool.map(lambda t: probe(t, quick=quick), TRAINERS))


def probe(trainer: Trainer, *, quick: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"name": trainer.name, "version": None, "usable": False}
    folder = package_folder(trainer.module)
    if folder is None:
        return {**found, "text": f"not installed; {trainer.install}"}
    found["version"] = version_of(trainer)
    if trainer.name == "apex" and not (folder / "normalization").is_dir():
        return {**found, "text": f"{folder} is not NVIDIA's apex; {trainer.install}"}
    if quick:
        return {**found, "usable": None, "text": "found, not imported (--quick)"}
    reason, _ = run_python(f"import importlib; importlib.import_module({trainer.probe!r})")
    if reason is not None:
        return {**found, "text": f"`import {trainer.probe}` failed: {reason}"}
    return {**found, "usable": True, "text": f"`import {trainer.probe}` works{_tested(found)}"}


def _tested(found: dict[str, Any]) -> str:
    """For Megatron: whether the contract tests run with this version."""
    if not found["name"].startswith("megatron") or found["version"] is None:
        return ""
    from megatron_dcp.adapters.megatron.versions import TABLE, tested_line

    if (line := tested_line(found["version"])) is not None:
        return f"; tested as {line.how}"
    known = ", ".join(t.minor for t in TABLE)
    return f"; outside the tested versions {known}: --mdcp-allow-untested is needed"


def package_folder(module: str) -> Path | None:
    """Where a package lies, without importing it; parents of a dotted name are not run either."""
    head, *rest = module.split(".")
    spec = util.find_spec(head)
    if spec is None:
        return None
    if not rest:
        origin = spec.origin if spec.origin and spec.origin != "namespace" else None
        places = list(spec.submodule_search_locations or [])
        if places:
            return Path(places[0])
        return Path(origin) if origin else None
    for place in spec.submodule_search_locations or []:
        folder = Path(place).joinpath(*rest)
        if (folder / "__init__.py").is_file():
            return folder
    return None


def version_of(trainer: Trainer) -> str | None:
    """From the installed distribution; a checkout on PYTHONPATH has none."""
    for name in trainer.distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def run_python(code: str) -> tuple[str | None, str]:
    """(why it failed or None, standard output) of a few lines in this interpreter."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True,
            timeout=IMPORT_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL,
            env=child_environment(),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"still running after {IMPORT_TIMEOUT_S:g} s", ""
    if done.returncode == 0:
        return None, done.stdout
    if done.returncode < 0:
        return f"ended by signal {-done.returncode}", ""
    lines = [x for x in done.stderr.strip().splitlines() if x.strip()]
    return (lines[-1] if lines else f"exit status {done.returncode}"), ""


def child_environment() -> dict[str, str]:
    """This process' environment and its module path, so that both see the same packages."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}


_LIST = """
import json
from megatron_dcp.adapters.megatron.training import patch_set
print("\\n" + json.dumps([status.line() for status in patch_set().check()]))
"""


def patch_lines(megatron: dict[str, Any], *, quick: bool) -> dict[str, Any]:
    """What `mdcp launch` would replace in the Megatron at hand, one line per patch."""
    if quick:
        return {"lines": [], "reason": "not checked (--quick)"}
    if not megatron["usable"]:
        return {"lines": [], "reason": "not checked, megatron-core is not usable"}
    reason, output = run_python(_LIST)
    if reason is not None:
        return {"lines": [], "reason": f"cannot be listed: {reason}"}
    return {"lines": json.loads(output.strip().splitlines()[-1]), "reason": None}
