"""nvcc compiles every kernel for sm_80 and sm_90a, and ptxas spills nothing that it must not."""

import ctypes
import subprocess
import sys

import pytest
from shim_driver import load_build_module

build_cuda = load_build_module()
NVCC = build_cuda.find_nvcc()

needs_nvcc = pytest.mark.skipif(
    NVCC is None, reason="nvcc was not found on PATH, in CUDA_HOME or in /usr/local/cuda"
)

LOG = """\
ptxas info    : Compiling entry function '_ZN4a' for 'sm_80'
ptxas info    : Function properties for _ZN4a
    24 bytes stack frame, 16 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 16 bytes smem
ptxas info    : Compiling entry function '_ZN4b' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers
"""


def test_the_ptxas_report_is_read():
    first, second = build_cuda.parse_ptxas(LOG)
    assert (first.kernel, first.architecture, first.registers) == ("_ZN4a", "80", 255)
    assert (first.stack_bytes, first.spill_store_bytes, first.spill_load_bytes) == (24, 16, 12)
    assert (second.kernel, second.architecture, second.registers) == ("_ZN4b", "90a", 40)
    assert second.spill_store_bytes == 0


@needs_nvcc
@pytest.mark.timeout(1500)
def test_every_kernel_compiles_and_the_forward_does_not_spill():
    reports = build_cuda.build_cuda(NVCC).reports
    by_architecture = {}
    for report in reports:
        by_architecture.setdefault(report.architecture, set()).add(report.kernel)
    assert set(by_architecture) >= {"80", "90a"}
    assert by_architecture["80"] == by_architecture["90a"]
    forward = [r for r in reports if "attention_forward_kernel" in r.kernel]
    assert len(forward) == 2 * 2 * 4  # architectures, dtypes, head dims
    spilling = [r for r in reports if r.spill_store_bytes or r.spill_load_bytes]
    for r in spilling:
        print(
            f"spills {r.spill_store_bytes} B: {build_cuda.readable(r.kernel)} sm_{r.architecture}"
        )
    assert [r for r in spilling if r in forward and "Li256E" not in r.kernel] == []


@needs_nvcc
def test_the_library_loads_and_a_launch_without_a_gpu_returns_35(tmp_path):
    """Linked with static cudart, the code loads on a machine that has no driver."""
    if subprocess.run(["which", "nvidia-smi"], capture_output=True).returncode == 0:
        pytest.skip("this machine has an NVIDIA driver; tests/gpu runs the kernels instead")
    cuda = build_cuda.build_cuda(NVCC)
    segments = build_cuda.compile_all(
        [(build_cuda.CSRC / "ops/cpu/segments.cc", build_cuda.HOST_FLAGS, "g++")]
    )
    library = tmp_path / "libkernels.so"
    visible = tmp_path / "visible.cc"
    visible.write_text(
        '#include "ops/cuda/api.h"\n'
        'extern "C" __attribute__((visibility("default"))) int probe() {\n'
        "  MdcpAttentionDelta args{};\n"
        "  args.rows = 8; args.heads = 1; args.head_dim = 8;\n"
        "  args.out.dtype = args.dout.dtype = MDCP_F32;\n"
        "  return mdcp_cuda_attention_delta(&args, nullptr);\n}\n"
    )
    subprocess.run(
        ["g++", "-shared", "-fPIC", "-I", str(build_cuda.CSRC), str(visible), *cuda.objects,
         *map(str, segments), *cuda.link_args, "-o", str(library)],
        check=True,
    )  # fmt: skip
    assert ctypes.CDLL(str(library)).probe() == 35


CHECK_REGISTRATION = """
import sys, torch
from megatron_dcp import ops
torch.ops.load_library(sys.argv[1])
for op in ("varlen_attention", "segment_attention_backward", "ulysses_pack", "cross_entropy"):
    assert torch._C._dispatch_has_kernel_for_dispatch_key("megatron_dcp::" + op, "CUDA"), op
print("registered")
"""


@needs_nvcc
def test_the_glue_registers_with_a_torch_that_has_no_gpu(tmp_path):
    """The kernels behind their torch glue load, and are registered, on any torch."""
    from torch.utils.cpp_extension import include_paths, library_paths

    cuda = build_cuda.build_cuda(NVCC)
    flags = [*build_cuda.HOST_FLAGS, "-DTORCH_TARGET_VERSION=0x020a000000000000"]
    flags.append(f'-DMDCP_CUDA_BUILT_FOR="{", ".join(cuda.architectures)}"')
    for folder in include_paths():
        flags += ["-isystem", folder]
    sources = [*build_cuda.glue_sources(), build_cuda.CSRC / "ops/cpu/segments.cc"]
    objects = build_cuda.compile_all([(path, flags, "g++") for path in sources])
    library = tmp_path / "libcuda_ops.so"
    link = [part for folder in library_paths() for part in (f"-L{folder}", f"-Wl,-rpath,{folder}")]
    subprocess.run(
        ["g++", "-shared", "-Wl,--no-undefined", *map(str, objects), *cuda.objects,
         *cuda.link_args, *link, "-ltorch", "-ltorch_cpu", "-lc10", "-o", str(library)],
        check=True,
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", CHECK_REGISTRATION, str(library)], capture_output=True, text=True
    )
    assert done.stdout.strip() == "registered", done.stderr[-2000:]


@needs_nvcc
@pytest.mark.parametrize("listed", ["7.5", "8", "12.34"])
def test_an_architecture_that_cannot_be_built_is_named(monkeypatch, listed):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    with pytest.raises(ValueError, match=r"sm_|8\.0 or newer"):
        build_cuda.architectures(NVCC)


@needs_nvcc
def test_the_architecture_list_of_torch_is_honoured(monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;8.9 10.0a+PTX")
    assert build_cuda.architectures(NVCC) == ["80", "90a", "89", "100a"]
