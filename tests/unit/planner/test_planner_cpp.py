"""The C++ planner alone: fuzz, sanitizers, and the instruction count of one large plan.

Everything here is compiled by tests/cpp/Makefile with g++ only. The programs are kept in the
build cache (csrc/build_cuda.py) under a hash of what they are made of.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.unit.ops_cuda.shim_driver import load_build_module

ROOT = Path(__file__).parents[3]
LENGTHS = ROOT / "tests" / "data" / "lengths"
# Instructions of planning wiki_4096 on 1024 ranks (g++ -O2), regression bar: 5 % slack.
INSTRUCTIONS = 19_497_659
COMPILER = shutil.which("g++")

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


PROGRAMS = ("planner_fuzz", "planner_driver")


def version_of_everything() -> str:
    """Hash of the compiler and of every file that the Makefile reads."""
    assert COMPILER is not None
    told = subprocess.run([COMPILER, "--version"], capture_output=True, check=True).stdout
    digest = hashlib.sha256(told + os.environ.get("CXX", "").encode())
    cpp, planner = ROOT / "tests" / "cpp", ROOT / "csrc" / "planner"
    for path in sorted([*cpp.iterdir(), *planner.glob("*.cc"), *planner.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:24]


def build(folder: Path, mode: str) -> Path:
    cache, version = load_build_module().cache_folder(), version_of_everything()
    kept = {name: cache / f"{name}-{mode}-{version}" for name in PROGRAMS}
    if not all(path.is_file() for path in kept.values()):
        command = ["make", "-s", "-j2", "-C", str(ROOT / "tests" / "cpp"), f"BUILD={folder}"]
        subprocess.run([*command, f"MODE={mode}"], check=True, timeout=280)
        for name, path in kept.items():
            partial = path.with_suffix(f".{os.getpid()}.part")
            shutil.copy2(folder / name, partial)
            partial.rename(path)
    for name, path in kept.items():
        path.touch()  # in use
        shutil.copy2(path, folder / name)
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("plain"), "plain")


def output(*command: object) -> str:
    run = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_fuzz(plain: Path) -> None:
    text = output(plain / "planner_fuzz", 0, 20_000)
    counts = [int(x) for x in re.findall(r"\d+", text)]
    assert counts[0] == 20_000
    assert counts[1] > 15_000
    assert counts[1] + counts[2] == 20_000


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_fuzz_a_million(plain: Path) -> None:
    for first in range(0, 1_000_000, 50_000):
        assert output(plain / "planner_fuzz", first, 50_000).startswith("50000 cases")


def test_sanitizers(tmp_path: Path) -> None:
    folder = build(tmp_path, "sanitize")
    assert output(folder / "planner_fuzz", 0, 300).startswith("300 cases")
    line = output(folder / "planner_driver", "plan", LENGTHS / "wiki_512.txt", 512, 64, 8, 1, 1)
    assert line.startswith("512/64 makespan_us 1")


def test_instruction_count(plain: Path, tmp_path: Path) -> None:
    if shutil.which("valgrind") is None:
        pytest.skip("needs valgrind (callgrind) to count instructions")
    out = tmp_path / "callgrind.out"
    command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}",
               "--toggle-collect=mdcp::make_plan*", plain / "planner_driver",
               "plan", LENGTHS / "wiki_4096.txt", 4096, 1024, 8, 1, 1]  # fmt: skip
    output(*command)
    found = re.search(r"^summary: (\d+)", out.read_text(), re.MULTILINE)
    assert found is not None
    count = int(found.group(1))
    assert count <= 1.05 * INSTRUCTIONS, f"{count} instructions, the record is {INSTRUCTIONS}"
