"""The emulated kernels under AddressSanitizer and ThreadSanitizer, each in a process of its own.

ThreadSanitizer knows each emulated thread as a fiber and each barrier, warp operation and
asynchronous copy as what it orders, so it reports any two accesses of shared or global memory that
nothing orders, under one schedule, whether or not the result came out right.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import sanitized
from shim_driver import FAULTS, Shim, load_build_module

SCRIPT = Path(__file__).with_name("sanitized.py")


def run(sanitizer: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    library = load_build_module().build_emulated(sanitizer, [FAULTS])
    runtime = {"address": "libasan.so", "thread": "libtsan.so"}[sanitizer]
    found = subprocess.run(
        ["g++", f"-print-file-name={runtime}"], capture_output=True, text=True, check=True
    )
    return subprocess.run(
        [sys.executable, str(SCRIPT), str(library), *arguments],
        env={**os.environ, "LD_PRELOAD": found.stdout.strip(), "OPENBLAS_NUM_THREADS": "1",
             "ASAN_OPTIONS": "detect_leaks=0", **environment},
        capture_output=True, text=True, timeout=1100,
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["attention", "memory"])
def test_no_kernel_touches_foreign_memory(mode):
    done = run("address", mode)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "finished" in done.stdout


@pytest.mark.parametrize("fault", ["past_shared", "past_global"])
def test_address_sanitizer_sees_a_write_past_the_end(fault):
    done = run("address", f"fault:{fault}")
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
    assert "faults.cu" in done.stderr


def objections(site: str = "") -> list[str]:
    """What is said of the kernels without the synchronisation at `site` ("": with all of them)."""
    done = run("thread", "races", site, TSAN_OPTIONS="halt_on_error=1 exitcode=66")
    signs = ("WARNING: ThreadSanitizer: data race", "ShimError", "wrong result")
    found = [sign for sign in signs if sign in done.stderr]
    assert found or "finished" in done.stdout, done.stdout + done.stderr[-3000:]
    return found


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_each_synchronisation_is_needed():
    """Leaves out each barrier, warp barrier and copy wait in turn: it must show.

    The race detector objects to a missing barrier; a missing wait leaves poison in shared memory.
    """
    shim = Shim.build()
    for case in sanitized.RACE_CASES:
        sanitized.run(shim, *case, segments=sanitized.RACE_SEGMENTS)
    sanitized.run_memory_races(shim)
    sites = [site for _, site in shim.sites() if not site.startswith("faults.cu")]
    assert len(sites) == 23
    assert objections() == []
    assert [site for site in sites if not objections(site)] == []
