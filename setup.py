"""Builds megatron-dcp: the planner (pybind11, no torch) and, where torch is installed, its ops.

`megatron_dcp._planner` is always built. `megatron_dcp._C` (the torch ops) is built only when torch
can be imported by the building interpreter (`pip install --no-build-isolation .`); without it the
package still plans, simulates and reports. CUDA objects are added when nvcc is found.

Environment (build only, never behaviour): MAX_JOBS, MDCP_BUILD_OPS=0|1, MDCP_BUILD_CUDA=0|1,
TORCH_CUDA_ARCH_LIST.
"""

from __future__ import annotations

import os
import sys
from glob import glob
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
sys.path[:0] = [str(ROOT), str(ROOT / "csrc")]

import build_cuda  # noqa: E402  (csrc/build_cuda.py)

OLDEST_TORCH = (2, 10)
# The planner promises equal bytes on every machine: no fused multiply-add, no -march.
PLANNER_FLAGS = ["-std=c++20", "-O3", "-g0", "-ffp-contract=off", "-fvisibility=hidden", "-Wall"]


def planner_extension() -> Extension:
    import pybind11

    return Extension(
        "megatron_dcp._planner",
        sources=sorted(glob("csrc/planner/*.cc")),
        depends=sorted(glob("csrc/planner/*.h")),
        include_dirs=[pybind11.get_include(), "csrc"],
        extra_compile_args=PLANNER_FLAGS,
        language="c++",
    )


def wants_ops() -> bool:
    """Whether to build `megatron_dcp._C`: MDCP_BUILD_OPS decides, else whether torch is here."""
    choice = os.environ.get("MDCP_BUILD_OPS", "")
    if choice not in ("", "0", "1"):
        raise SystemExit(f"MDCP_BUILD_OPS is {choice!r}; set it to 0 (no torch ops) or 1 (build).")
    if choice == "0":
        return False
    try:
        import torch
    except ImportError:
        if choice == "1":
            raise SystemExit(
                "MDCP_BUILD_OPS=1 but torch cannot be imported by this interpreter. Install torch "
                "first and build with `pip install --no-build-isolation .`"
            ) from None
        print("torch is not installed: megatron_dcp._C (the torch ops) is not built.")
        return False
    found = tuple(int(x) for x in torch.__version__.split(".")[:2])
    if found < OLDEST_TORCH:
        raise SystemExit(
            f"torch {torch.__version__} found; the ops are built on the stable ABI of torch "
            f"{'.'.join(map(str, OLDEST_TORCH))}. Install that or a newer one, or set "
            "MDCP_BUILD_OPS=0 to plan, simulate and report without the ops."
        )
    return True


def ops_extension() -> Extension:
    import torch
    from torch.utils.cpp_extension import include_paths, library_paths

    # The stable ABI of torch 2.10: one binary for every later torch and every Python >= 3.10.
    # No fused multiply-add behind our back: the vector kernels ask for it where they want it.
    return Extension(
        "megatron_dcp._C",
        sources=sorted(glob("csrc/ops/*.cc") + glob("csrc/ops/cpu/*.cc")),
        depends=sorted(glob("csrc/ops/*.h") + glob("csrc/ops/cpu/*.h")),
        include_dirs=["csrc", *include_paths()],
        library_dirs=library_paths(),
        libraries=["torch", "torch_cpu", "c10"],
        define_macros=[
            ("TORCH_TARGET_VERSION", "0x020a000000000000"),
            ("_GLIBCXX_USE_CXX11_ABI", str(int(torch.compiled_with_cxx11_abi()))),
        ],
        extra_compile_args=[
            "-std=c++20",
            "-O3",
            "-g0",
            "-ffp-contract=off",
            "-fno-math-errno",
            "-fvisibility=hidden",
            "-Wall",
            "-Wno-uninitialized",  # gcc 12 says it of its own AVX-512 headers
        ],
        language="c++",
        py_limited_api=True,
    )


def cuda_build() -> build_cuda.CudaBuild | None:
    """The compiled CUDA kernels, or None with a line that says why they are left out.

    MDCP_BUILD_CUDA=1 needs nvcc, 0 leaves them out; else they are built where nvcc is found and
    torch has CUDA (a CPU build of torch could not call them).
    """
    import torch

    choice = os.environ.get("MDCP_BUILD_CUDA", "")
    if choice not in ("", "0", "1"):
        raise SystemExit(f"MDCP_BUILD_CUDA is {choice!r}; set it to 0 (leave out) or 1 (build).")
    if choice == "0":
        print("MDCP_BUILD_CUDA=0: the CUDA kernels are not built.")
        return None
    if choice == "" and torch.version.cuda is None:
        print("this torch has no CUDA: the CUDA kernels are not built (MDCP_BUILD_CUDA=1 does).")
        return None
    nvcc = build_cuda.find_nvcc()
    if nvcc is None:
        where = "on PATH, in CUDA_HOME or in /usr/local/cuda"
        if choice == "1":
            raise SystemExit(f"MDCP_BUILD_CUDA=1 but nvcc was not found {where}.")
        print(f"nvcc was not found {where}: the CUDA kernels are not built.")
        return None
    try:
        return build_cuda.build_cuda(nvcc)
    except ValueError as error:  # an architecture that cannot be built
        raise SystemExit(str(error)) from None


def add_cuda(extension: Extension, cuda: build_cuda.CudaBuild) -> None:
    """Links the kernels and their torch registrations into `megatron_dcp._C`."""
    extension.sources += sorted(glob("csrc/ops/cuda/glue*.cc"))
    extension.depends += sorted(glob("csrc/ops/cuda/*.h"))
    extension.extra_objects += cuda.objects
    extension.extra_link_args += cuda.link_args
    built_for = ", ".join(cuda.architectures)
    extension.define_macros.append(("MDCP_CUDA_BUILT_FOR", f'"{built_for}"'))


extensions = [planner_extension()] if glob("csrc/planner/*.cc") else []
if glob("csrc/ops/*.cc") and wants_ops():
    extensions.append(ops_extension())
    if (cuda := cuda_build()) is not None:
        add_cuda(extensions[-1], cuda)

setup(
    name="megatron-dcp",
    description="Data-Centric Parallel: sequence lengths decide, every step, how a batch is run",
    long_description=(ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["megatron_dcp", "megatron_dcp.*"]),
    package_data={"megatron_dcp": ["py.typed", "*.pyi"]},
    install_requires=[
        "numpy>=1.26",
        "tyro>=0.9",
        "rich>=13",
        "matplotlib>=3.8",
        "plotly>=5.20",
        "highspy>=1.7",
    ],
    extras_require={
        "torch": ["torch>=2.10", "safetensors>=0.4"],
        "megatron": ["torch>=2.10", "megatron-core>=0.16"],
        "deepspeed": ["torch>=2.10", "deepspeed>=0.19"],
        "hf": ["torch>=2.10", "transformers>=5", "accelerate>=1.10"],
        "verify": ["hypothesis>=6", "ortools>=9.10"],
        "video": ["torch>=2.10", "av>=14", "pillow>=10"],  # examples/video_dit on real files
        "dev": [
            "pytest>=8",
            "pytest-timeout",
            "pytest-xdist",
            "hypothesis>=6",
            "ruff",
            "mypy",
            "import-linter",
        ],
    },
    entry_points={"console_scripts": ["mdcp = megatron_dcp.cli.main:main"]},
    ext_modules=extensions,
    cmdclass={"build_ext": build_ext},
    zip_safe=False,
)
