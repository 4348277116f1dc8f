"""Compiles the CUDA kernels: with nvcc for GPUs, with g++ for the SIMT shim that tests run.

Imported by setup.py and by tests; standard library only. Objects are kept in a cache folder
(`MDCP_BUILD_CACHE`, by default `~/.cache/megatron-dcp/build`) under a hash of the compiler, its
flags and every local file that the source includes, so that nothing unchanged is compiled twice.
Beside each nvcc object lies ptxas' report.

`python csrc/build_cuda.py` compiles all kernels and prints registers and spills of each.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

CSRC = Path(__file__).resolve().parent
KERNELS = CSRC / "ops" / "cuda"
EMULATE = KERNELS / "emulate"

DEFAULT_ARCHITECTURES = ("80", "90a")
#: ptxas works on one kernel at a time; nvcc peaks below this for every file here.
BYTES_PER_JOB = 1 << 30
DAYS_KEPT = 30

NVCC_FLAGS = ("-std=c++17", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden", "-Xptxas", "-v")
HOST_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")
EMULATE_FLAGS = ("-std=c++20", "-DMDCP_EMULATE", "-fPIC", "-Wall", "-Wextra")
SANITIZERS: dict[str | None, tuple[str, ...]] = {
    None: ("-O2",),
    "address": ("-O1", "-g1", "-fsanitize=address", "-fno-omit-frame-pointer", "-DMDCP_ASAN"),
    "thread": ("-O1", "-g1", "-fsanitize=thread", "-DMDCP_TSAN"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelReport:
    """What ptxas said of one kernel: sizes in bytes."""

    kernel: str
    architecture: str
    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaBuild:
    """Objects and linker arguments that setup.py adds to `megatron_dcp._C`."""

    objects: list[str]
    include_dirs: list[str]
    link_args: list[str]
    architectures: list[str]
    reports: list[KernelReport]


def cache_folder() -> Path:
    """MDCP_BUILD_CACHE, else `build` in MDCP_CACHE, else in the user's cache folder."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "megatron-dcp"
    shared = Path(os.environ.get("MDCP_CACHE") or base)
    folder = Path(os.environ.get("MDCP_BUILD_CACHE") or shared / "build")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def forget_old_objects() -> None:
    """Deletes what no build has used for DAYS_KEPT days."""
    oldest = time.time() - DAYS_KEPT * 86400
    for path in cache_folder().iterdir():
        with contextlib.suppress(FileNotFoundError):  # another build was faster
            if path.stat().st_mtime < oldest:
                path.unlink()


def jobs() -> int:
    """`MAX_JOBS` when set; else one per core, fewer where memory is short."""
    if os.environ.get("MAX_JOBS"):
        return max(1, int(os.environ["MAX_JOBS"]))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return max(1, min(os.cpu_count() or 1, memory // BYTES_PER_JOB))


def find_nvcc() -> Path | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    candidates = [Path(home) / "bin" / "nvcc"] if home else []
    on_path = shutil.which("nvcc")
    candidates += [Path(on_path)] if on_path else []
    candidates.append(Path("/usr/local/cuda/bin/nvcc"))
    return next((path for path in candidates if path.is_file()), None)


def cuda_home(nvcc: Path) -> Path:
    """The toolkit of `nvcc`, also where `nvcc` is a link or a script elsewhere."""
    found = subprocess.run(
        [str(nvcc), "--dryrun", "-c", "-x", "cu", "/dev/null"], capture_output=True, text=True
    )
    match = re.search(r"^#\$ TOP=(.*)$", found.stderr, re.MULTILINE)
    return Path(match[1].strip()).resolve() if match else nvcc.resolve().parent.parent


def known_architectures(nvcc: Path) -> set[str]:
    listed = subprocess.run(
        [str(nvcc), "--list-gpu-code"], capture_output=True, text=True, check=True
    )
    return {line.removeprefix("sm_") for line in listed.stdout.split() if line.startswith("sm_")}


def architectures(nvcc: Path) -> list[str]:
    """sm_80 and sm_90a, and what TORCH_CUDA_ARCH_LIST adds ("8.0;9.0a;10.0+PTX"), as in "90a".

    Raises ValueError for one below 8.0 (no bf16 tensor cores, no cp.async) or unknown to nvcc.
    """
    wanted = list(DEFAULT_ARCHITECTURES)
    for name in re.split(r"[;,\s]+", os.environ.get("TORCH_CUDA_ARCH_LIST", "")):
        if not name:
            continue
        match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", name)
        if match is None or int(match[1]) < 8:
            raise ValueError(
                f"TORCH_CUDA_ARCH_LIST has {name!r}; the kernels need 8.0 or newer, written as "
                "in 8.0;9.0a. Remove it, or build with MDCP_BUILD_CUDA=0."
            )
        code = match[1] + match[2] + match[3]
        if code != "90" and code not in wanted:
            wanted.append(code)
    known = known_architectures(nvcc)
    missing = [code for code in wanted if code.rstrip("af") not in known]  # lists no suffixes
    if missing:
        raise ValueError(
            f"{nvcc} does not know {', '.join('sm_' + code for code in missing)}; it knows "
            f"{', '.join(sorted(known))}. Use a newer toolkit or set MDCP_BUILD_CUDA=0."
        )
    return wanted


def local_includes(source: Path) -> list[Path]:
    """`source` and every file that it includes with quotes, directly or not."""
    seen: list[Path] = []
    todo = [source.resolve()]
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.append(path)
        for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), re.MULTILINE):
            for folder in (path.parent, CSRC):
                if (folder / name).is_file():
                    todo.append((folder / name).resolve())
                    break
    return sorted(seen)


def _hash(source: Path, command: Sequence[str], compiler: str) -> str:
    digest = hashlib.sha256("\0".join([compiler, *command]).encode())
    for path in local_includes(source):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:24]


def _version(compiler: str) -> str:
    found = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
    return found.stdout


def _run(command: Sequence[str], what: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{what} failed:\n{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def compile_object(source: Path, flags: Sequence[str], compiler: str, version: str) -> Path:
    """The cached object of `source`; its compiler's output lies beside it as `.log`."""
    key = _hash(source, flags, version)
    target = cache_folder() / f"{source.stem}-{key}.o"
    if not target.is_file():
        partial = target.with_suffix(f".{os.getpid()}.part.o")
        command = [compiler, *flags, "-I", str(CSRC), "-c", str(source), "-o", str(partial)]
        log = _run(command, source.name)
        target.with_suffix(".log").write_text(log)
        partial.rename(target)
    for path in (target, target.with_suffix(".log")):
        path.touch()  # in use
    return target


def compile_all(work: Iterable[tuple[Path, Sequence[str], str]]) -> list[Path]:
    """Compiles (source, flags, compiler) each, `jobs()` at a time; results in the same order."""
    items = list(work)
    forget_old_objects()
    versions = {compiler: _version(compiler) for _, _, compiler in items}
    with ThreadPoolExecutor(jobs()) as pool:
        return list(pool.map(lambda item: compile_object(*item, version=versions[item[2]]), items))


def cuda_sources() -> list[Path]:
    return sorted(KERNELS.glob("*.cu"))


def host_sources() -> list[Path]:
    """Plain C++ that the kernels' host side needs; no torch."""
    return [KERNELS / "plan.cc"]


def parse_ptxas(log: str) -> list[KernelReport]:
    """Reads `ptxas -v`: one report per kernel and architecture."""
    reports: list[KernelReport] = []
    kernel = architecture = ""
    stack = stores = loads = 0
    for line in log.splitlines():
        if found := re.search(r"Compiling entry function '(\S+)' for 'sm_(\w+)'", line):
            kernel, architecture = found[1], found[2]
        elif found := re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line
        ):
            stack, stores, loads = (int(text) for text in found.groups())
        elif kernel and (found := re.search(r"Used (\d+) registers", line)):
            reports.append(
                KernelReport(
                    kernel=kernel,
                    architecture=architecture,
                    registers=int(found[1]),
                    stack_bytes=stack,
                    spill_store_bytes=stores,
                    spill_load_bytes=loads,
                )
            )
            kernel = ""
    return reports


def build_cuda(nvcc: Path) -> CudaBuild:
    """Every kernel, for `architectures(nvcc)`. cudart is static: the library loads anywhere."""
    home = cuda_home(nvcc)
    flags = [*NVCC_FLAGS]
    codes = architectures(nvcc)
    for code in codes:
        flags += ["-gencode", f"arch=compute_{code},code=sm_{code}"]
    objects = compile_all(
        [(path, flags, str(nvcc)) for path in cuda_sources()]
        + [(path, HOST_FLAGS, "g++") for path in host_sources()]
    )
    reports = [
        report for path in objects for report in parse_ptxas(path.with_suffix(".log").read_text())
    ]
    library = next(
        path
        for path in (home / "lib64", home / "lib", home / "targets" / "x86_64-linux" / "lib")
        if (path / "libcudart_static.a").is_file()
    )
    return CudaBuild(
        objects=[str(path) for path in objects],
        include_dirs=[str(home / "include")],
        link_args=[str(library / "libcudart_static.a"), "-lrt", "-ldl", "-lpthread"],
        architectures=[f"sm_{code}" for code in codes],
        reports=reports,
    )


def build_emulated(sanitizer: str | None = None, extra: Sequence[Path] = ()) -> Path:
    """The same kernels in the SIMT shim, as a shared library with the C interface of api.h.

    sanitizer: None, "address" or "thread" (kernels instrumented, the machine itself not).
    extra: further .cu files, such as a test's own kernels.
    """
    compiler = os.environ.get("CXX", "g++")
    tuned = [*EMULATE_FLAGS, *SANITIZERS[sanitizer]]
    plain = [flag for flag in tuned if not flag.startswith("-fsanitize=thread")]
    objects = compile_all(
        [(path, [*tuned, "-x", "c++"], compiler) for path in (*cuda_sources(), *extra)]
        + [
            (path, plain, compiler)
            for path in (*host_sources(), CSRC / "ops" / "cpu" / "segments.cc")
        ]
        + [(path, plain, compiler) for path in sorted(EMULATE.glob("*.cc"))]
    )
    key = hashlib.sha256("\0".join(path.name for path in objects).encode()).hexdigest()[:16]
    target = cache_folder() / f"libmdcp_emulated-{sanitizer or 'plain'}-{key}.so"
    if not target.is_file():
        partial = target.with_suffix(f".{os.getpid()}.part")
        link = [flag for flag in SANITIZERS[sanitizer] if flag.startswith("-fsanitize")]
        _run([compiler, "-shared", *link, *map(str, objects), "-o", str(partial)], "link")
        partial.rename(target)
    target.touch()  # in use
    return target


def glue_sources() -> list[Path]:
    """The torch registrations of the kernels; they need torch's headers."""
    return sorted(KERNELS.glob("glue*.cc"))


def build_emulated_ops() -> Path:
    """The emulated kernels behind their torch glue: ops of `megatron_dcp_shim` for CPU tensors.

    The library implements the ops; whoever loads it defines their schemas first.
    """
    from torch.utils.cpp_extension import include_paths, library_paths

    compiler = os.environ.get("CXX", "g++")
    flags = [*EMULATE_FLAGS, "-O1", "-DTORCH_TARGET_VERSION=0x020a000000000000"]
    for folder in include_paths():
        flags += ["-isystem", folder]
    kernels = build_emulated()
    objects = compile_all([(path, flags, compiler) for path in glue_sources()])
    names = "\0".join([kernels.name, *(path.name for path in objects), *library_paths()])
    key = hashlib.sha256(names.encode()).hexdigest()[:16]
    target = cache_folder() / f"libmdcp_emulated_ops-{key}.so"
    if not target.is_file():
        link = [str(kernels), f"-Wl,-rpath,{cache_folder()}"]
        for folder in library_paths():
            link += [f"-L{folder}", f"-Wl,-rpath,{folder}"]
        partial = target.with_suffix(f".{os.getpid()}.part")
        _run(
            [compiler, "-shared", *map(str, objects), *link, "-ltorch", "-ltorch_cpu", "-lc10",
             "-o", str(partial)],
            "link",
        )  # fmt: skip
        partial.rename(target)
    target.touch()  # in use
    return target


def readable(kernel: str) -> str:
    """Names of a mangled kernel without the compiler's noise."""
    short = re.sub(r"_GLOBAL__N__\w+?_cu_[0-9a-f]{8}", "", kernel)
    names = re.findall(r"(?<=\d)([a-z_]+_kernel)", short)
    numbers = re.findall(r"Li(\d+)E", short)
    kinds = [kind for kind in ("bfloat16", "half") if kind in short]
    return " ".join([*(names[:1] or [short]), *kinds, "x".join(numbers)]).strip()


def main() -> int:
    nvcc = find_nvcc()
    if nvcc is None:
        print("nvcc was not found (PATH, CUDA_HOME, /usr/local/cuda): nothing compiled")
        return 1
    for report in build_cuda(nvcc).reports:
        print(
            f"sm_{report.architecture:5} registers {report.registers:3} "
            f"spilled {report.spill_store_bytes:4} B  {readable(report.kernel)}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
