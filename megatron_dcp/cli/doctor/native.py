"""The compiled parts and what they run on: torch, `_planner`, `_C`, the CUDA toolkit, GPUs.

Each function returns a dictionary with `usable` (True or False) and `text`, the reason or the
details; none raises for something that is missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from importlib import import_module
from pathlib import Path
from typing import Any

DTYPES = ("float64", "float32", "bfloat16", "float16")


def first_line(error: BaseException) -> str:
    """Type and first line of an error."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no message'}"


def torch_status() -> dict[str, Any]:
    try:
        torch = import_module("torch")
    except Exception as error:
        # A broken installation raises OSError or RuntimeError; it is reported, not hidden.
        hint = "; planning, simulating and reporting work without it"
        return {"usable": False, "version": None, "build": None, "text": first_line(error) + hint}
    cuda, hip = torch.version.cuda, getattr(torch.version, "hip", None)
    build = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "CPU"
    text = f"{build} build, {torch.get_num_threads()} threads"
    return {"usable": True, "version": str(torch.__version__), "build": build, "text": text}


def planner_status() -> dict[str, Any]:
    try:
        module = import_module("megatron_dcp._planner")
    except ImportError as error:
        return {
            "usable": False,
            "text": f"{first_line(error)}; build it with `python setup.py build_ext --inplace` or "
            "`pip install .`",
        }
    return {"usable": True, "text": Path(str(module.__file__)).name}


def ops_status() -> dict[str, Any]:
    """Whether `megatron_dcp._C` loads, the CPU path of each dtype, whether CUDA kernels are in."""
    found: dict[str, Any] = {"usable": False, "cpu_paths": {}, "cuda_kernels": False}
    try:
        import_module("megatron_dcp.ops")
        library: Any = import_module("megatron_dcp._C")
    except Exception as error:
        return {**found, "text": first_line(error)}
    found["usable"] = True
    found["cpu_paths"] = {dtype: library.cpu_path(dtype) for dtype in DTYPES}
    paths = ", ".join(f"{dtype} {path}" for dtype, path in found["cpu_paths"].items())
    found["cuda_kernels"] = _has_cuda_kernels()
    cuda = "CUDA kernels built" if found["cuda_kernels"] else f"no CUDA kernels ({_why_no_cuda()})"
    return {**found, "text": f"CPU path: {paths}; {cuda}"}


def _has_cuda_kernels() -> bool:
    import torch

    name = "megatron_dcp::"
    registered = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith(name)]
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return any(has(n, "CUDA") for n in registered)


def _why_no_cuda() -> str:
    import torch

    if torch.version.cuda is None:
        return "this torch is a CPU build"
    if _nvcc() is None:
        return "nvcc was not found; install the CUDA toolkit or set CUDA_HOME, then build again"
    return "built without them; build again with MDCP_BUILD_CUDA=1"


def _nvcc() -> str | None:
    for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if home and (Path(home) / "bin" / "nvcc").is_file():
            return str(Path(home) / "bin" / "nvcc")
    return shutil.which("nvcc")


def _output(*command: str) -> list[str] | None:
    """Lines of a tool's standard output, or None where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()


def cuda_toolkit() -> dict[str, Any]:
    path = _nvcc()
    if path is None:
        return {
            "usable": False,
            "text": "nvcc not found on PATH, in CUDA_HOME or in /usr/local/cuda (needed to build "
            "CUDA kernels only)",
        }
    lines = _output(path, "--version") or []
    release = next((x.strip() for x in lines if "release" in x), "its version cannot be read")
    return {"usable": True, "text": f"{path}: {release}"}


def gpus() -> dict[str, Any]:
    """Names of the devices as torch sees them, else as the driver does."""
    try:
        import torch

        if torch.cuda.is_available():
            names = []
            for i in range(torch.cuda.device_count()):
                p = torch.cuda.get_device_properties(i)
                names.append(f"{p.name}, sm_{p.major}{p.minor}, {p.total_memory / 1e9:.0f} GB")
            return {"devices": names, "reason": None}
        why = (
            "this torch is a CPU build"
            if torch.version.cuda is None
            else "torch.cuda.is_available() is False (driver?)"
        )
    except Exception as error:
        why = f"torch cannot be imported ({first_line(error)})"
    seen = _output("nvidia-smi", "-L")
    if seen is None:
        return {"devices": [], "reason": f"{why}, and nvidia-smi finds no device"}
    return {"devices": [f"{x} (not usable: {why})" for x in seen], "reason": why}
