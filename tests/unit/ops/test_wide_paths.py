"""The AVX-512, bfloat16 and AMX paths on any machine: their templates over vectors in plain C++.

tests/cpp/wide_paths.cc compares random segment lists, forward and backward, with the scalar path in
double. What the instructions themselves do is left to machines that have them
(test_attention_paths.py).
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
COMPILER = shutil.which("g++")
SANITIZE = ("-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


def cases(folder: Path, first: int, count: int, *flags: str) -> str:
    """What wide_paths prints for cases [first, first + count), all of which must agree."""
    assert COMPILER is not None
    ops = ROOT / "csrc" / "ops" / "cpu"
    sources = [ROOT / "tests" / "cpp" / "wide_paths.cc"]
    sources += [ops / f"{name}.cc" for name in ("plan", "segments", "scalar")]
    program = folder / "wide_paths"
    options = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Wno-psabi", *flags]
    includes = [f"-I{ROOT / 'csrc'}", f"-I{ops}"]
    subprocess.run(
        [COMPILER, *options, *includes, *map(str, sources), "-o", str(program)],
        check=True,
        timeout=240,
    )
    done = subprocess.run(
        [program, str(first), str(count)], capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_wide_paths_agree_with_the_scalar_path(tmp_path):
    assert cases(tmp_path, 0, 40) == "40 cases\n"


@pytest.mark.nightly
def test_wide_paths_under_the_sanitizers(tmp_path):
    assert cases(tmp_path, 1000, 300, *SANITIZE) == "300 cases\n"
